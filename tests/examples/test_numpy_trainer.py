"""The NumPy trainer: gradients, alignment with its negative controls, and kills at any line."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support import trainer
from support.played_steps import ROLLOUTS, TOKENS, seal_step, weights_bytes

from examples import numpy_trainer
from examples.numpy_trainer import CLIP, Learner, Misaligned, Tokens, loss_and_gradient, train
from headpond.batches import Batch, BatchReader, read_trainer
from headpond.demo import tiny_moe
from headpond.demo.tiny_moe import Weights

SCRIPT = Path(numpy_trainer.__file__)
BARE = 'import runpy, sys; sys.meta_path.insert(0, runpy.run_path(sys.argv[1])["Refusing"]()); del sys.argv[:2]; '
BARE += 'runpy.run_path(sys.argv[0], run_name="__main__")'
STEPS = 3
STEP_SIZE = 1e-6


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with three steps, the last of them sampled by the versions 0, 1 and 2."""
    run_dir = tmp_path_factory.mktemp("sealed")
    weights = {0: tiny_moe.initial_weights(0)}
    for step in range(STEPS):
        seal_step(run_dir, step, weights)
        [*_] = train(run_dir, seed=0, keep_batches=True)
        weights[step + 1] = tiny_moe.load(run_dir / "weights" / f"version_{step + 1}")
    for made in ("checkpoint.safetensors", "weights", "trainer/rank_00.json", "trainer/policy.json"):
        path = run_dir / made
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return run_dir


@pytest.fixture
def run_dir(sealed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sealed, tmp_path / "run")


def first_batch(run_dir: Path, step: int = 0) -> Batch:
    return next(BatchReader(run_dir, data_rank=0, data_ranks=1, resume_step=step - 1))


def test_the_script_trains_with_numpy_and_xxhash_only(run_dir: Path) -> None:
    command = [sys.executable, "-c", BARE, trainer.__file__, str(SCRIPT), str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 0", "step 1", "step 2"]
    assert re.fullmatch(
        r"step 2: reward 0\.\d\d, 8 rollouts, 48 tokens, loss \S+, 48 logprobs within \de-0[678]", lines[2]
    )
    state = read_trainer(run_dir)
    assert (state.acked, state.checkpointed) == (2, 2)
    assert state.policy
    assert (state.policy.version, state.policy.weights) == (3, str(run_dir / "weights" / "version_3"))
    reports = [json.loads(line) for line in (run_dir / "training.jsonl").read_text().splitlines()]
    assert [report["aligned"] for report in reports] == [ROLLOUTS * TOKENS] * STEPS
    assert reports[-1]["versions"] == [0, 1, 2], "weights changed while these tokens were sampled"


def test_the_gradient_of_the_loss_is_that_of_finite_differences(run_dir: Path) -> None:
    """With other weights than those that sampled, so that some ratios are clipped."""
    tokens = Tokens.of(next(first_batch(run_dir).micro_batches()))
    weights = {name: 1.4 * array.astype(np.float64) for name, array in tiny_moe.initial_weights(0).items()}
    ratios = np.exp(numpy_trainer.logprobs_of(weights, tokens) - tokens.logprobs)
    clipped = ((ratios > 1 + CLIP) & (tokens.advantages > 0)) | ((ratios < 1 - CLIP) & (tokens.advantages < 0))
    assert 0 < np.count_nonzero(clipped) < len(clipped)
    assert np.abs(np.abs(ratios - 1) - CLIP).min() > 1e-4, "no token is at the edge, where there is no gradient"
    _, gradient = loss_and_gradient(weights, tokens, 10.0)
    generator = np.random.default_rng(0)
    for name, array in gradient.items():
        for place in (int(np.abs(array).argmax()), *generator.integers(array.size, size=3).tolist()):
            ends: list[float] = []
            for sign in (1, -1):
                moved = {**weights, name: weights[name].copy()}
                moved[name].flat[place] += sign * STEP_SIZE
                ends.append(loss_and_gradient(moved, tokens, 10.0)[0])
            expected = (ends[0] - ends[1]) / (2 * STEP_SIZE)
            assert array.flat[place] == pytest.approx(expected, rel=1e-5, abs=1e-9), f"{name}[{place}]"


def test_the_loss_is_the_weighted_mean_over_all_micro_batches(run_dir: Path) -> None:
    batch = first_batch(run_dir)
    tokens = [Tokens.of(mb) for mb in batch.micro_batches()]
    assert len(tokens) > 1
    weights = tiny_moe.initial_weights(0)
    loss = sum(loss_and_gradient(weights, each, batch.totals.denominator)[0] for each in tokens)
    advantages = np.concatenate([each.advantages for each in tokens])
    assert loss == pytest.approx(-advantages.mean(), abs=1e-6), "every ratio is 1 before the first update"


@pytest.mark.parametrize("column", ["rows", "completion", "versions", "logprobs"])
def test_a_column_that_is_shifted_by_one_token_is_noticed(tmp_path: Path, column: str) -> None:
    weights = {0: tiny_moe.initial_weights(0)}
    seal_step(tmp_path, 0, weights)
    [*_] = train(tmp_path, seed=0, keep_batches=True)
    weights[1] = tiny_moe.load(tmp_path / "weights" / "version_1")
    seal_step(tmp_path, 1, weights, shifted=column)
    before = weights_bytes(tmp_path)
    with pytest.raises(Misaligned, match=r"step 1: .*logprobs of version [01]"):
        [*_] = train(tmp_path, seed=0, keep_batches=True)
    assert weights_bytes(tmp_path) == before, "nothing was trained on them"


def test_weights_that_are_no_longer_kept_are_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_trainer, "KEPT_VERSIONS", 2)
    with pytest.raises(Misaligned, match=r"step 2 .* version 0"):
        [*_] = train(run_dir, seed=0, keep_batches=True)
    assert sorted(path.name for path in (run_dir / "weights").iterdir()) == ["version_1", "version_2"]


# Kills

TRACED = {str(SCRIPT), *(str(Path(tiny_moe.__file__).parent / name) for name in (
    "store/atomic.py", "batches/signals.py", "batches/reader.py", "tiny_moe.py",
))}  # fmt: skip


def train_until(run_dir: Path, line: int) -> int:
    """Train in a process of its own that is killed at the given line it executes; 0: never. Its exit status."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    executed = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal executed
        if frame.f_code.co_filename not in TRACED:
            return None
        executed += event == "line"
        if event == "line" and executed == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    status = 1
    try:
        sys.settrace(trace)
        [*_] = train(run_dir, seed=0, keep_batches=False)
        sys.settrace(None)
        (run_dir / "executed").write_text(str(executed))
        status = 0
    finally:
        os._exit(status)


@pytest.fixture(scope="module")
def trained(sealed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], int]:
    """What an uninterrupted trainer leaves, and how many lines it executes."""
    run_dir = shutil.copytree(sealed, tmp_path_factory.mktemp("trained") / "run")
    assert train_until(run_dir, 0) == 0
    return weights_bytes(run_dir), int((run_dir / "executed").read_text())


@pytest.mark.parametrize("kills", [7, pytest.param(60, marks=pytest.mark.slow)])
def test_a_trainer_killed_at_any_line_reaches_the_same_weights(
    sealed: Path, tmp_path: Path, trained: tuple[dict[str, bytes], int], kills: int
) -> None:
    expected, lines = trained
    assert lines > 500
    for line in np.linspace(1, lines - 1, kills).astype(int).tolist():
        run_dir = shutil.copytree(sealed, tmp_path / str(line))
        assert train_until(run_dir, line) == signal.SIGKILL
        assert train_until(run_dir, 0) == 0
        assert weights_bytes(run_dir) == expected, f"killed at line {line} of {lines}"
        assert read_trainer(run_dir).acked == STEPS - 1


def test_a_trainer_that_is_killed_again_and_again_reaches_the_same_weights(
    run_dir: Path, trained: tuple[dict[str, bytes], int]
) -> None:
    expected, lines = trained
    kills = 0
    while train_until(run_dir, lines // 2 - 13 * kills) == signal.SIGKILL:
        kills += 1
        assert kills < 40, "it makes no progress"
    assert kills > 1
    assert weights_bytes(run_dir) == expected


def test_a_resumed_learner_has_the_weights_of_recent_versions(run_dir: Path) -> None:
    [*_] = train(run_dir, seed=0, keep_batches=True)
    resumed = Learner(run_dir, seed=99)
    assert (resumed.step, resumed.version) == (STEPS - 1, STEPS)
    saved = tiny_moe.load(run_dir / "weights" / "version_3")
    assert all(np.array_equal(resumed.weights[name], saved[name]) for name in saved)
    assert same(resumed._recent[0], tiny_moe.initial_weights(0))  # pyright: ignore[reportPrivateUsage]


def same(one: Weights, other: Weights) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)
