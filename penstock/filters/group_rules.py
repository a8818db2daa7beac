"""The rules over a group's rewards, each with its settings."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from penstock.filters.verdicts import Mode
from penstock.sections import Section

EQUAL_REWARDS = 1e-9
"""Spread up to which rewards are equal, relative to the largest (at least 1): the mean of three 0.1 is not 0.1."""


@dataclass(frozen=True, kw_only=True)
class GroupRewards:
    """The input of a group rule: the reward of every scored rollout, before and after length shaping."""

    rewards: NDArray[np.float64]
    shaped: NDArray[np.float64]
    judged: NDArray[np.float64] | None = None
    """what `zero_variance` compares, where it is not `shaped`: the estimator's own values"""


MatchGroup = Callable[[GroupRewards], bool]
"""A group rule: whether the group matches."""


class ZeroVariance(Section):
    """Groups whose shaped rewards are all equal (of `gdpo`, `grpo_process` and `grpo_agents`: whose values are all 0).
    Applies to estimators that learn from differences within a group."""

    mode: Mode = Mode.DROP
    """What happens to the rollouts of a matching group: `off`, `monitor` (count), `mask` (no loss) or `drop`."""

    def matches(self, group: GroupRewards) -> bool:
        return rewards_are_equal(group.shaped if group.judged is None else group.judged)


class Difficulty(Section):
    """Groups that are too hard or too easy, by the mean of their rewards before shaping."""

    mode: Mode = Mode.OFF
    """What happens to the rollouts of a matching group: `off`, `monitor` (count), `mask` (no loss) or `drop`."""
    low: float = 0.0
    """Groups with a lower mean reward match."""
    high: float = 1.0
    """Groups with a higher mean reward match."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "Difficulty":
        if not self.low <= self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high}): all groups would match")
        return self

    def matches(self, group: GroupRewards) -> bool:
        return not self.low <= math.fsum(group.rewards) / len(group.rewards) <= self.high


def rewards_are_equal(rewards: NDArray[np.float64]) -> bool:
    return bool(np.ptp(rewards) <= EQUAL_REWARDS * max(1.0, np.abs(rewards).max()))
