"""From no model to a rising curve, as the quickstart says: a tiny model, its server, init, up."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster import BIN
from support.documents import ROOT
from support.vllm_server import Release, VllmServer

TINY_MODEL = ROOT / "examples" / "tiny_model.py"
STEPS = 25
FEW = 5
"""steps whose mean reward is compared, the first with the last"""
RISEN = 0.15
REASONING = ("--reasoning-parser", "qwen3")
"""It would take answers without </think> for thoughts; the quickstart's command does not have it."""


@pytest.mark.slow
def test_a_new_user_sees_the_reward_rise(
    start_server: Callable[..., VllmServer], release: Release, tmp_path: Path
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADPOND_", "PYTHON"))}
    python = os.environ.get("HEADPOND_TORCH_PYTHON", str(release.python))  # vLLM's environment has torch

    def output(*command: str, directory: Path = tmp_path) -> str:
        done = subprocess.run(command, cwd=directory, env=kept, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    headpond, mine = str(BIN / "headpond"), tmp_path / "mine"
    output(python, str(TINY_MODEL), str(tmp_path / "tiny"))
    server = start_server(str(tmp_path / "tiny"), without=REASONING)
    output(headpond, "init", "mine", "--engine", server.url, "--torch", python)
    ended = json.loads(output(headpond, "up", "run.toml", "--steps", str(STEPS), "--json", directory=mine))
    assert (ended["phase"], ended["step"], ended["audit"]["balanced"]) == ("done", STEPS, True)
    assert not any(ended["restarts"].values())
    training, annotations = "training/training.jsonl", "trainer/annotations.rank_00.jsonl"
    lines, annotated = ((mine / "runs" / "first" / name).read_text().splitlines() for name in (training, annotations))
    assert [json.loads(line)["step"] for line in annotated] == [*range(STEPS)]
    curve = [json.loads(line)["reward"] for line in lines]
    assert len(curve) == STEPS
    assert sum(curve[-FEW:]) / FEW > sum(curve[:FEW]) / FEW + RISEN, curve
    version, _, run = server.get("/weight_info")["weight_version"].partition("@")
    assert (int(version) >= STEPS - 1, run) == (True, ended["run"]), "the last step was played with these weights"
