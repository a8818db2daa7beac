"""What an environment thinks of a rollout, in whichever form it says so."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StageError
from penstock.messages import METRICS_LIMIT, NAME_CHARACTERS, REWARDS_LIMIT

METRICS_OF_RECORDING = 9
"""what a rollout's reply says besides those of the environment"""


@dataclass(frozen=True, kw_only=True)
class Score:
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """named parts of the reward, for estimators that treat them one by one"""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])
    """numbers of every token of every sample, one sample after the other: they reach the trainer untouched"""


AnyScore = Score | float | Mapping[str, float]
"""A mapping names rewards; the reward is their sum."""


def checked_score(found: AnyScore) -> Score:
    match found:
        case Score():
            score = found
        case Mapping():
            rewards = _numbers("reward", found, REWARDS_LIMIT)
            return Score(reward=math.fsum(rewards.values()), rewards=rewards)
        case _:
            score = Score(reward=found)
    return Score(
        reward=_number("the reward", score.reward),
        rewards=_numbers("reward", score.rewards, REWARDS_LIMIT),
        metrics=_numbers("metric", score.metrics, METRICS_LIMIT - METRICS_OF_RECORDING),
        columns=score.columns,
    )


def _numbers(kind: str, found: Mapping[Any, Any], limit: int) -> dict[str, float]:
    if len(found) > limit:
        raise StageError(f"a score has {len(found)} {kind}s: at most {limit} travel with a rollout")
    for name in found:
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS:
            raise StageError(f"{name!r} is no name of a {kind}: a text of 1 to {NAME_CHARACTERS} characters is")
    return {name: _number(f"the {kind} {name}", value) for name, value in found.items()}


def _number(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise StageError(f"{what} is {value!r}: a score, a number or a mapping of named rewards is wanted") from None
    if not math.isfinite(number):
        raise StageError(f"{what} is {number}: it must be finite")
    return number
