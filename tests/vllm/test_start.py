"""From a server to its training, as the quickstart says: init, an environment of one's own, up."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster import BIN
from support.documents import ROOT
from support.vllm_server import VllmServer

TORCH = Path(os.environ.get("PENSTOCK_TORCH_PYTHON", ROOT / ".venv-torch" / "bin" / "python")).absolute()
STEPS = 12
LETTERS = """
class Letters:
    examples = [f"Tell me about number {n}." for n in range(64)]

    async def rollout(self, example, policy):
        completion = await policy.chat([{"role": "user", "content": example}])
        letters = [char for char in completion.content.lower() if char.isalpha()]
        return letters.count("o") / max(1, len(letters))
"""
CHANGES = {
    'use = "sums:Sums"': 'use = "letters:Letters"',
    "size = 16": "size = 6",
    "max_tokens = 512": "max_tokens = 24",
    "# more = {": "more = {",
    "--lr 1e-5": "--lr 5e-4",
}


@pytest.mark.slow
def test_a_new_user_trains_the_model_of_the_server(start_server: Callable[..., VllmServer], tmp_path: Path) -> None:
    server = start_server("dense/0")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTHON"))}

    def penstock(*words: str, directory: Path) -> str:
        done = subprocess.run([BIN / "penstock", *words], cwd=directory, env=kept, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    penstock("init", "mine", "--engine", server.url, "--torch", str(TORCH), directory=tmp_path)
    mine = tmp_path / "mine"
    (mine / "letters.py").write_text(LETTERS)
    text = (mine / "run.toml").read_text()
    for before, after in CHANGES.items():
        assert before in text
        text = text.replace(before, after)
    (mine / "run.toml").write_text(text)
    ended = json.loads(penstock("up", "run.toml", "--steps", str(STEPS), "--json", directory=mine))
    assert (ended["phase"], ended["step"], ended["audit"]["balanced"]) == ("done", STEPS, True)
    assert not any(ended["restarts"].values())
    lines = (mine / "runs" / "first" / "training" / "training.jsonl").read_text().splitlines()
    curve = [json.loads(line)["reward"] for line in lines]
    assert len(curve) == STEPS
    assert max(curve) > 0, "rewards of the environment reach the trainer; test_learning.py shows that they rise"
    annotated = (mine / "runs" / "first" / "trainer" / "annotations.rank_00.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in annotated] == [*range(STEPS)]
    assert server.get("/weight_info")["weight_version"].startswith(f"{STEPS}@")
