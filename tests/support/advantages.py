"""Groups and recipes for the tests of advantages."""

from dataclasses import replace
from typing import Any

import numpy as np

from headpond.advantages import (
    ESTIMATORS,
    AdvantageSettings,
    Estimator,
    Floats,
    GroupValues,
    Recipe,
    Shaping,
    TurnValues,
    group_phase,
    resolve,
)


def allowed(of: GroupValues, estimator: str) -> GroupValues:
    """The group with its rewards raised to the least that the estimator accepts."""
    return replace(of, rewards=np.maximum(of.rewards, ESTIMATORS[estimator].min_reward))


def group(rewards: list[float], *columns: Any, named: dict[str, list[float]] | None = None) -> GroupValues:
    """Without `named`, a reward `greedy` of 0 and the whole one; without turns, one turn a rollout without a reward."""
    completion, tool, inputs, turns = columns or [[1] * len(rewards)] * 4
    named = named or {"greedy": [0.0] * len(rewards), "whole": rewards}
    unscored = TurnValues(rewards=np.full(1, np.nan), agents=("",), tokens=np.ones(1, np.int64))
    return GroupValues(
        rewards=np.array(rewards, np.float64),
        completion_tokens=np.array(completion, np.int64),
        tool_tokens=np.array(tool, np.int64),
        input_tokens=np.array(inputs, np.int64),
        turns=np.array(turns, np.int64),
        named_rewards={name: np.array(values) for name, values in named.items()},
        by_turn=(unscored,) * len(rewards),
    )


def recipe(
    estimator: str | Estimator = "dr_grpo", *, group_size: int = 8, shaping: str | Shaping = "none", name: str = "mine"
) -> Recipe:
    """`name` is that of a custom estimator."""
    settings = AdvantageSettings(
        estimator=estimator if isinstance(estimator, str) else "none",
        length_shaping=shaping if isinstance(shaping, str) else "none",
        completion_weight=1.0,
        tool_weight=0.5,
    )
    resolved = resolve(settings, group_size=group_size)
    if isinstance(estimator, Estimator):
        resolved = replace(resolved, name=name, estimator=estimator)
    return resolved if isinstance(shaping, str) else replace(resolved, shaping=shaping)


def values(estimator: str, of: GroupValues | list[float]) -> Floats:
    return group_phase(of if isinstance(of, GroupValues) else group(of), recipe(estimator)).values
