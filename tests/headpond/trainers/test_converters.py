"""A batch in the structures of slime, miles and SkyRL, by their definitions (read in November 2026)."""

import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.documents import ROOT, Page
from support.rollouts import MadeRollout, MadeTurn, RolloutMaker, drawn, plan_of, seal
from support.stores import directory_store

from headpond import BatchReader
from headpond.batches import Batch, read_trainer
from headpond.trainers.skyrl import to_generator_output
from headpond.trainers.slime import to_samples

TURN, LONG = MadeTurn(context=2, completion=3), MadeTurn(context=4, completion=7)


@dataclass
class SlimeSample:
    """The fields of slime's `Sample` that a rollout function sets."""

    group_index: int | None = None
    index: int | None = None
    prompt: str = ""
    tokens: list[int] = field(default_factory=list[int])
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list[str])
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    status: Status = Status.PENDING


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int


@pytest.fixture
def made(tmp_path: Path) -> dict[str, MadeRollout]:
    maker = RolloutMaker(store=directory_store(tmp_path / "store"), experts="uint8")
    rollouts = [
        maker.make("g1-0", [[TURN, LONG], [TURN]], group="g1"),
        maker.make("g1-1", [[LONG]], group="g1"),
        maker.make("g2-0", [[TURN]], group="g2"),
    ]
    seal(maker.store, plan_of(rollouts))
    return {each.planned.rollout: each for each in rollouts}


@pytest.fixture
def batch(tmp_path: Path, made: dict[str, MadeRollout]) -> Batch:
    return next(BatchReader(tmp_path, data_rank=0, data_ranks=1))


def test_slime_gets_groups_of_samples(batch: Batch, made: dict[str, MadeRollout]) -> None:
    groups = to_samples(batch, SlimeSample)
    assert [[sample.metadata["rollout"] for sample in group] for group in groups] == [
        ["g1-0", "g1-0", "g1-1"],
        ["g2-0"],
    ]
    for rollout, sample, number in [("g1-0", groups[0][0], 0), ("g1-0", groups[0][1], 1), ("g2-0", groups[1][0], 0)]:
        source = made[rollout]
        span = source.columns.sample(number)
        prompt = int(source.columns.first_prompt_length[number])
        assert sample.tokens == source.columns.input_ids[span].tolist()
        assert sample.response_length == len(sample.tokens) - prompt
        assert sample.loss_mask == source.columns.loss_mask[span][prompt:].tolist()
        assert sample.rollout_log_probs == source.columns.logprobs[span][prompt:].tolist()
        assert sample.reward == pytest.approx(source.planned.reward)
        assert sample.metadata["advantage"] == pytest.approx(source.planned.advantage, rel=1e-6)
        assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, 2, 3)
        rows = np.where(source.valid[number][:, None, None], source.rows[number], 0)
        np.testing.assert_array_equal(sample.rollout_routed_experts, rows[:-1])
        truncated = bool(source.columns.truncated[number])
        assert sample.status is (SlimeSample.Status.TRUNCATED if truncated else SlimeSample.Status.COMPLETED)
        assert sample.weight_versions == ["3"]


def test_the_rollout_function_of_the_guide_returns_steps_and_acknowledges_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fields of slime's `Sample` alone: slime is not a package that can be installed."""
    maker = RolloutMaker(store=directory_store(tmp_path / "store"))
    for step in range(2):
        seal(maker.store, plan_of([maker.make(f"g{step}-0", [[TURN]], group=f"g{step}")], step=step))
    [block] = [each for each in Page(ROOT / "docs" / "trainers.md").blocks("python") if "slime_rollout" in each]
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    for name in ("slime", "slime.utils", "slime.utils.types"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["slime.utils.types"].Sample = SlimeSample  # type: ignore[attr-defined]
    script: dict[str, Any] = {}
    exec(block, script)
    for step, acked in ((0, -1), (1, 0)):
        [[sample]] = script["rollout"](None, step, None)
        assert sample.metadata["rollout"] == f"g{step}-0"
        assert read_trainer(tmp_path).acked == acked


def test_skyrl_gets_lists_of_equal_lengths(batch: Batch, made: dict[str, MadeRollout]) -> None:
    output = to_generator_output(batch, TrajectoryID)
    assert output.keys() == {
        "prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_metrics",
        "rollout_logprobs", "trajectory_ids", "trajectory_generation_times", "rollout_expert_indices",
        "rollout_sample_support", "is_last_step",
    }  # fmt: skip
    assert output["rollout_sample_support"] is None, "nothing was truncated"
    assert {len(values) for values in output.values() if values is not None} == {4}
    assert output["is_last_step"] == [False, True, True, True]
    rewards = [0.0, *(made[name].planned.reward for name in ("g1-0", "g1-1", "g2-0"))]
    assert output["rewards"] == pytest.approx(rewards)
    assert [(each.instance_id, each.repetition_id) for each in output["trajectory_ids"]] == [
        ("g1", 0), ("g1", 0), ("g1", 1), ("g2", 0)
    ]  # fmt: skip
    for prompt, response, mask, logprobs, routes in zip(
        *(output[name] for name in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs",
                                    "rollout_expert_indices")), strict=True
    ):  # fmt: skip
        assert len(response) == len(mask) == len(logprobs)
        assert (routes.shape, routes.dtype) == ((len(prompt) + len(response), 2, 3), np.uint8)


def test_skyrl_gets_the_tokens_that_truncation_left(tmp_path: Path) -> None:
    """Three turns of three tokens: not truncated, truncated, and truncated with a penalty."""
    store = directory_store(tmp_path / "store")
    seal(store, plan_of([drawn(store, "g1-0", masks=True), drawn(store, "g1-1", masks=False)]))
    output = to_generator_output(next(BatchReader(tmp_path, data_rank=0, data_ranks=1)), TrajectoryID)
    with_masks, without = output["rollout_sample_support"]
    nothing = [-1, -1, -1]
    known = [[100, 101, -1], [102, -1, -1], [103, 104, 105]]
    assert with_masks.tolist() == [*[nothing] * 5, *known, *[nothing] * 5]
    assert without.tolist() == [nothing] * 13
    assert with_masks.dtype == np.int32
    assert [len(each) for each in output["response_ids"]] == [13, 13]
