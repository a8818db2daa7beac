"""The score of a rollout: `Score`, the shorter forms that environments may return, and their validation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headpond.errors import StageError
from headpond.messages import AGENT_CHARACTERS, AGENTS_LIMIT, METRICS_LIMIT, NAME_CHARACTERS, REWARDS_LIMIT

METRICS_OF_RECORDING = 14
"""metrics that the worker adds to the environment's in a rollout's reply"""


@dataclass(frozen=True, kw_only=True)
class Score:
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """named parts of the reward, for estimators that use them separately"""
    turn_rewards: Sequence[float] | None = None
    """one reward for each turn, in the order of `policy.chat`, for estimators that answer per turn"""
    agent_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """one reward for each name given to `policy.chat(agent=...)`, for estimators that answer per agent"""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """fields for the trainer, declared as `[batch.fields.NAME]`: one number per token or per sample, the samples one
    after the other, or one number for all"""


AnyScore = Score | float | Mapping[str, float]
"""A mapping holds named rewards; the reward is their sum."""


def checked_score(returned: AnyScore | None) -> Score:
    """What an environment returned, as a Score of finite floats. Raises StageError for anything else."""
    match returned:
        case Score():
            score = returned
        case Mapping():
            rewards = _numbers("reward", returned, REWARDS_LIMIT)
            return Score(reward=total(rewards), rewards=rewards)
        case _:
            score = Score(reward=_number("the reward", returned))
    return Score(
        reward=_number("the reward", score.reward),
        rewards=_numbers("reward", score.rewards, REWARDS_LIMIT),
        turn_rewards=_turn_rewards(score.turn_rewards),
        agent_rewards=_numbers("agent reward", score.agent_rewards, AGENTS_LIMIT, characters=AGENT_CHARACTERS),
        metrics=_numbers("metric", score.metrics, METRICS_LIMIT - METRICS_OF_RECORDING),
        columns=score.columns,
    )


def total(rewards: Mapping[str, float]) -> float:
    """The reward of named ones: their sum, the same in any order. Raises StageError if a float cannot hold it."""
    try:
        return math.fsum(rewards.values())
    except OverflowError:
        raise StageError("the sum of the rewards is too large for a float: scale them down") from None


def _turn_rewards(given: Sequence[float] | None) -> tuple[float, ...] | None:
    if given is None:
        return None
    return tuple(_number(f"the reward of turn {number}", value) for number, value in enumerate(given))


def _numbers(
    kind: str, values: Mapping[Any, Any], limit: int, *, characters: int = NAME_CHARACTERS
) -> dict[str, float]:
    if len(values) > limit:
        raise StageError(f"a score has {len(values)} {kind}s: the limit is {limit}")
    for name in values:
        if not isinstance(name, str) or not 0 < len(name) <= characters:
            raise StageError(f"{name!r} is not a valid name for a {kind}: use a string of 1 to {characters} characters")
    return {name: _number(f"the {kind} {name}", value) for name, value in values.items()}


def _number(what: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes | bytearray):  # which float() would read
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise StageError(f"{what} is {value!r}: return a Score, a number or a mapping of named rewards") from None
    if not math.isfinite(number):
        raise StageError(f"{what} is {number}: it must be finite")
    return number
