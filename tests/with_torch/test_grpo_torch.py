"""examples/grpo_torch.py by torchrun, on sealed steps: data ranks, checkpoints, a kill, published weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.documents import ROOT
from support.processes import kill_tree
from support.torch_batches import model_of, seal_groups
from support.waiting import wait_until

from headpond.batches.signals import RunStatus, read_trainer, write_status

STEPS, KILLED_AFTER, CHECKPOINT_EVERY = 6, 4, 3
WAIT_S = 300.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    model_of("dense").save_pretrained(directory)
    return directory


def start(run_dir: Path, model_dir: Path, *, ranks: int) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(ROOT / "examples" / "grpo_torch.py"), str(run_dir), str(model_dir), str(run_dir / "output")]
    options = ["--lr", "1e-2", "--checkpoint-every", str(CHECKPOINT_EVERY)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (run_dir / "trainer.log").open("ab") as log:
        return subprocess.Popen([*torchrun, *script, *options], env=variables, stdout=log, stderr=log)


def finish(run_dir: Path, trainer: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    write_status(run_dir, RunStatus(why="over", ended=True, last_step=STEPS - 1))
    assert trainer.wait(WAIT_S) == 0, (run_dir / "trainer.log").read_text()[-3000:]
    return reports(run_dir)


def reports(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "output" / "training.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trained(run_dir: Path, model_dir: Path, *, ranks: int) -> list[dict[str, Any]]:
    run_dir.mkdir()
    seal_groups(run_dir, steps=STEPS, data_ranks=ranks)
    return finish(run_dir, start(run_dir, model_dir, ranks=ranks))


def weights(run_dir: Path, version: int = STEPS) -> dict[str, Any]:
    return load_file(run_dir / "output" / "weights" / str(version) / "model.safetensors")


def test_two_ranks_train_as_one(tmp_path: Path, model_dir: Path) -> None:
    """Each on its half of the micro-batches, with the gradient of the whole step."""
    one, two = (trained(tmp_path / str(ranks), model_dir, ranks=ranks) for ranks in (1, 2))
    assert [report["step"] for report in two] == list(range(STEPS))
    for name in ("reward", "norm"):
        assert [report[name] for report in two] == pytest.approx([report[name] for report in one], rel=1e-3)
    first = load_file(model_dir / "model.safetensors")
    for name, tensor in weights(tmp_path / "2").items():
        assert not torch.equal(tensor, first[name]), name
        torch.testing.assert_close(tensor, weights(tmp_path / "1")[name], atol=2e-3, rtol=0)


def test_a_killed_trainer_resumes_to_the_same_weights(tmp_path: Path, model_dir: Path) -> None:
    """Bit for bit, from a checkpoint that is a step behind."""
    trained(tmp_path / "whole", model_dir, ranks=2)
    run_dir = tmp_path / "killed"
    run_dir.mkdir()
    seal_groups(run_dir, steps=KILLED_AFTER, data_ranks=2)
    trainer = start(run_dir, model_dir, ranks=2)
    wait_until(
        lambda: len(reports(run_dir)) == KILLED_AFTER or trainer.poll() is not None, timeout_s=WAIT_S, what="its steps"
    )
    assert trainer.poll() is None, (run_dir / "trainer.log").read_text()[-3000:]
    kill_tree(trainer.pid)
    trainer.wait()
    before = read_trainer(run_dir)
    assert (before.acked, before.checkpointed) == (KILLED_AFTER - 1, CHECKPOINT_EVERY - 1)
    seal_groups(run_dir, first=KILLED_AFTER, steps=STEPS - KILLED_AFTER, data_ranks=2)
    steps = [report["step"] for report in finish(run_dir, start(run_dir, model_dir, ranks=2))]
    assert steps == [*range(KILLED_AFTER), *range(CHECKPOINT_EVERY, STEPS)], "it began after its checkpoint"
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(run_dir)[name]), name
    state = read_trainer(run_dir)
    assert (state.acked, state.checkpointed) == (STEPS - 1, STEPS - 1)
    assert state.policy is not None
    assert (state.policy.version, state.policy.weights) == (STEPS, str(run_dir / "output" / "weights" / str(STEPS)))
