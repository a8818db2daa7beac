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
"""Largest size of a reward. Differences, squares and quotients of such rewards stay finite, also
as float32."""


@dataclass(frozen=True, kw_only=True)
class TurnValues:
    """The turns of one rollout in order, one entry a turn."""

    rewards: Floats
    """`Score.turn_rewards`; NaN if the environment scored no turns."""
    agents: tuple[str, ...]
    """The names given to `policy.chat(agent=...)`, "" if none was given."""
    tokens: Ints
    """Completion tokens of each turn."""


@dataclass(frozen=True, kw_only=True)
class GroupValues:
    """The n scored rollouts of one group, one entry a rollout."""

    rewards: Floats
    completion_tokens: Ints
    tool_tokens: Ints
    input_tokens: Ints
    turns: Ints
    named_rewards: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """`Score.rewards` by name. NaN if a rollout's score lacks the name. A rollout whose policy
    failed has its reward under every name."""
    agents: tuple[Mapping[str, int], ...] = ()
    """The agents that the environment named, in the order of their first turns, with their
    completion tokens. `()` if no rollout has any."""
    agent_rewards: tuple[Mapping[str, float], ...] = ()
    """`Score.agent_rewards`. `()` if no rollout has any."""
    by_turn: tuple[TurnValues, ...] = ()
    """The turns of each rollout, needed by estimators with `per_turn`."""
    environment: str = ""
    example: int = -1
    """The example's number in its environment."""

    def __post_init__(self) -> None:
        lengths = [len(column) for column in (self.completion_tokens, self.tool_tokens, self.input_tokens, self.turns)]
        lengths += [len(column) for column in self.named_rewards.values()]
        lengths += [len(column) for column in (self.agents, self.agent_rewards, self.by_turn) if column]
        if set(lengths) != {len(self.rewards)} or not lengths[0]:
            raise StageError(f"a group of {len(self.rewards)} rewards has columns of {lengths} entries")


@dataclass(frozen=True, kw_only=True)
class BatchValues:
    """The rollouts of one batch, one entry a rollout, sorted by the text of their ids. Names that
    `GroupValues` has too mean the same."""

    values: Floats
    """The results of the group phase."""
    sampled_tokens: Ints
    rewards: Floats = field(default_factory=lambda: np.empty(0))
    """The rewards before length shaping."""
    named_rewards: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    agents: tuple[Mapping[str, int], ...] = ()
    agent_rewards: tuple[Mapping[str, float], ...] = ()
    by_turn: tuple[TurnValues, ...] = ()
    turn_values: tuple[Floats, ...] = ()
    """The results of the group phase with `per_turn`, one value a turn."""
    groups: tuple[str, ...] = ()
    environments: tuple[str, ...] = ()
    examples: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        columns = [self.rewards, self.agents, self.agent_rewards, self.by_turn, self.turn_values]
        columns += [self.groups, self.environments, self.examples]
        lengths = [len(self.sampled_tokens), *(len(column) for column in self.named_rewards.values())]
        lengths += [len(column) for column in columns if len(column)]
        if set(lengths) != {len(self.values)}:
            raise StageError(f"a batch of {len(self.values)} values has columns of {lengths} entries")


def mean(values: Floats) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Floats) -> float:
    """Return the standard deviation with n - 1: a group is a sample of the policy's rollouts."""
    return math.sqrt(math.fsum((values - mean(values)) ** 2) / (len(values) - 1))


def token_means(values: Sequence[Floats], turns: Sequence[TurnValues]) -> Floats:
    """Average each rollout's turn values over its completion tokens; 0 without any."""
    return np.array(
        [
            math.fsum(value * turn.tokens) / tokens if (tokens := int(turn.tokens.sum())) else 0.0
            for value, turn in zip(values, turns, strict=True)
        ],
        np.float64,
    )


def named_rewards(named: Sequence[Mapping[str, float]], rewards: Floats, failed: Sequence[bool]) -> dict[str, Floats]:
    """Collect the named rewards into columns. A rollout whose policy failed has no named
    rewards: its reward replaces each."""
    missing = [float(reward) if fails else np.nan for reward, fails in zip(rewards, failed, strict=True)]
    names = dict.fromkeys(name for parts in named for name in parts)
    return {
        name: np.array([parts.get(name, other) for parts, other in zip(named, missing, strict=True)], np.float64)
        for name in names
    }


def named_values(entries: Sequence[Mapping[str, Number]]) -> tuple[Mapping[str, Number], ...]:
    return tuple(entries) if any(entries) else ()
