import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headpond.config import RunConfig
from headpond.records.inputs import GroupInputs, StepValues
from headpond.records.rollout import RolloutResult
from headpond.store import open_store
from headpond.tasks.stages.advantage import estimate_group
from headpond.tasks.stages.batch_phase import estimate_step

STORE = open_store("memory://advantages")
MODULE = """
import numpy as np
from headpond.advantages import Estimator

seen = []

def note(values):
    seen.append(values)
    return np.zeros(len(values.rewards))

both = Estimator(group=note, batch=note, needs_variance=False)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "noting_rules.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("noting_rules", None)


CONFIG = RunConfig.model_validate({"advantages": {"estimator": "noting_rules:both"}, "rollouts": {"group_size": 3}})


def check(values: Any) -> None:
    """The second rollout has no `brief`; the policy of the third failed: its reward stands for both parts."""
    named = {name: each.tolist() for name, each in values.named_rewards.items()}
    assert named["right"] == [1.0, 0.5, -1.0]
    assert named["brief"] == pytest.approx([0.25, float("nan"), -1.0], nan_ok=True)
    assert values.agents == ({"white": 3, "black": 1}, {}, {})


def test_named_rewards_and_agents_reach_the_group_phase() -> None:
    results = [
        RolloutResult(reward=1.25, rewards={"right": 1.0, "brief": 0.25}, agents={"white": 3, "black": 1}),
        RolloutResult(reward=0.5, rewards={"right": 0.5}),
        RolloutResult(reward=-1.0, policy_error="timeout"),
    ]
    members = {f"g0000001-{n}": result for n, result in enumerate(results)}
    group = GroupInputs(group="g0000001", environment="sums", example=7, policy_version=0, members=members)
    result = estimate_group(STORE, group, CONFIG, execution="e1")
    assert result.advantages == {f"g0000001-{n}": 0.0 for n in range(3)}
    assert result.credit is None
    (values,) = sys.modules["noting_rules"].seen
    check(values)
    assert (values.environment, values.example) == ("sums", 7)


def test_named_rewards_and_agents_reach_the_batch_phase() -> None:
    step = StepValues(
        rollouts=["a", "b", "c"], groups=["g", "g", "h"], environments=["sums"] * 3, examples=[7, 7, 8],
        values=[1.0, 2.0, 3.0], rewards=[1.25, 0.5, -1.0], completion_tokens=[4, 5, 6], failed=[False, False, True],
        named_rewards=[{"right": 1.0, "brief": 0.25}, {"right": 0.5}, {}], agents=[{"white": 3, "black": 1}, {}, {}],
        state=None,
    )  # fmt: skip
    assert estimate_step(STORE, step, CONFIG, credit="plans/c").advantages == {"a": 0.0, "b": 0.0, "c": 0.0}
    (values,) = sys.modules["noting_rules"].seen
    check(values)
    assert (values.groups, values.examples, values.values.tolist()) == (("g", "g", "h"), (7, 7, 8), [1.0, 2.0, 3.0])
