"""The inputs of the two phases, and the statistics that estimators and shapings use."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headpond.errors import StageError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Number = TypeVar("Number", int, float)

MAX_REWARD = 1e30
"""Differences, squares and quotients of rewards up to this size stay finite, also as float32."""


@dataclass(frozen=True, kw_only=True)
class TurnValues:
    """The turns of one rollout in their order, one entry each."""

    rewards: Floats
    """`Score.turn_rewards`; NaN where the environment scored no turns."""
    agents: tuple[str, ...]
    """The names given to `policy.chat(agent=...)`, "" without one."""
    tokens: Ints
    """Completion tokens."""


@dataclass(frozen=True, kw_only=True)
class GroupValues:
    """The n scored rollouts of one group, one entry each."""

    rewards: Floats
    completion_tokens: Ints
    tool_tokens: Ints
    input_tokens: Ints
    turns: Ints
    named_rewards: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """`Score.rewards` by name. NaN where a rollout's score lacks the name; where its policy failed, its reward."""
    agents: tuple[Mapping[str, int], ...] = ()
    """The agents that the environment named, in the order of their first turns, with their completion tokens. `()`
    if no rollout has any."""
    agent_rewards: tuple[Mapping[str, float], ...] = ()
    """`Score.agent_rewards`. `()` if no rollout has any."""
    by_turn: tuple[TurnValues, ...] = ()
    """For estimators with `per_turn`."""
    environment: str = ""
    example: int = -1
    """The example's number in its environment."""

    def __post_init__(self) -> None:
        lengths = [len(each) for each in (self.completion_tokens, self.tool_tokens, self.input_tokens, self.turns)]
        lengths += [len(each) for each in self.named_rewards.values()]
        lengths += [len(each) for each in (self.agents, self.agent_rewards, self.by_turn) if each]
        if set(lengths) != {len(self.rewards)} or not lengths[0]:
            raise StageError(f"a group of {len(self.rewards)} rewards has columns of {lengths} entries")


@dataclass(frozen=True, kw_only=True)
class BatchValues:
    """The rollouts of one batch sorted by the text of their ids, one entry each."""

    values: Floats
    """The results of the group phase."""
    sampled_tokens: Ints
    rewards: Floats = field(default_factory=lambda: np.empty(0))
    """Before length shaping."""
    named_rewards: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """As in GroupValues."""
    agents: tuple[Mapping[str, int], ...] = ()
    """As in GroupValues."""
    agent_rewards: tuple[Mapping[str, float], ...] = ()
    """As in GroupValues."""
    by_turn: tuple[TurnValues, ...] = ()
    """As in GroupValues."""
    turn_values: tuple[Floats, ...] = ()
    """With `per_turn`: the results of the group phase, one value a turn."""
    groups: tuple[str, ...] = ()
    environments: tuple[str, ...] = ()
    examples: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        columns = [self.rewards, self.agents, self.agent_rewards, self.by_turn, self.turn_values]
        columns += [self.groups, self.environments, self.examples]
        lengths = [len(self.sampled_tokens), *(len(each) for each in self.named_rewards.values())]
        lengths += [len(each) for each in columns if len(each)]
        if set(lengths) != {len(self.values)}:
            raise StageError(f"a batch of {len(self.values)} values has columns of {lengths} entries")


def mean(values: Floats) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Floats) -> float:
    """Standard deviation with n - 1: a group is a sample of the policy's rollouts."""
    return math.sqrt(math.fsum((values - mean(values)) ** 2) / (len(values) - 1))


def token_means(values: Sequence[Floats], turns: Sequence[TurnValues]) -> Floats:
    """One value a rollout: the mean over its completion tokens; 0 without any."""
    return np.array(
        [
            math.fsum(value * each.tokens) / tokens if (tokens := int(each.tokens.sum())) else 0.0
            for value, each in zip(values, turns, strict=True)
        ],
        np.float64,
    )


def named_rewards(named: Sequence[Mapping[str, float]], rewards: Floats, failed: Sequence[bool]) -> dict[str, Floats]:
    """A rollout whose policy failed has no parts: its reward stands for each."""
    missing = [float(reward) if fails else np.nan for reward, fails in zip(rewards, failed, strict=True)]
    names = dict.fromkeys(name for parts in named for name in parts)
    return {
        name: np.array([parts.get(name, other) for parts, other in zip(named, missing, strict=True)], np.float64)
        for name in names
    }


def named_values(entries: Sequence[Mapping[str, Number]]) -> tuple[Mapping[str, Number], ...]:
    return tuple(entries) if any(entries) else ()
