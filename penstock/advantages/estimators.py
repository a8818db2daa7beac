"""The estimators: a function of a group's shaped rewards, and for some a function of the batch's values.

`advantages.estimator = "module:attribute"` names one of your own: an `Estimator`, or a function for its group phase.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.advantages.values import MAX_REWARD, BatchValues, Floats, GroupValues, deviation, mean

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, with the value that verl and others use: results stay comparable."""
VARIANCE_EPSILON = 1e-8
"""Added to the variance that whitening divides by, also with the value that verl and others use."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    group: Callable[[GroupValues], Floats]
    """Maps a group with shaped rewards to one value a rollout."""
    batch: Callable[[BatchValues], Floats] | Callable[[BatchValues, Any], tuple[Floats, Any]] | None = None
    """Maps the values of a whole batch to advantages; None where the group's values are final."""
    state: Any = None
    """The state before the first step: anything that JSON can hold, None for no state. With a state, `batch` takes
    (values, state) and returns (advantages, next state). The next state is kept with the step: a step that is formed
    again starts from the state before it."""
    needs_variance: bool = True
    """The values are differences within a group: equal rewards give exactly 0, and the zero-variance filter applies."""
    min_reward: float = -MAX_REWARD


def unchanged(group: GroupValues) -> Floats:
    return group.rewards


def centered(group: GroupValues) -> Floats:
    return group.rewards - mean(group.rewards)


def grpo(group: GroupValues) -> Floats:
    return centered(group) / (deviation(group.rewards) + STD_EPSILON)


def rloo(group: GroupValues) -> Floats:
    size = len(group.rewards)
    return centered(group) * size / (size - 1)


def max_rl(group: GroupValues) -> Floats:
    average = mean(group.rewards)
    return centered(group) / average if average > 0 else np.zeros(len(group.rewards))


def pass_at_k(group: GroupValues) -> Floats:
    second, best = np.sort(group.rewards)[-2:]
    values = np.zeros(len(group.rewards))
    values[group.rewards.argmax()] = best - second
    return values


def pass_at_k_normalised(group: GroupValues) -> Floats:
    return pass_at_k(group) / (deviation(group.rewards) + STD_EPSILON)


def whiten(batch: BatchValues) -> Floats:
    """Mean 0 and variance 1 over the batch's sampled tokens, each of which carries its rollout's value."""
    weights, tokens = batch.sampled_tokens, int(batch.sampled_tokens.sum())
    if tokens < 2:
        return np.zeros(len(batch.values))
    differences = batch.values - math.fsum(weights * batch.values) / tokens
    variance = math.fsum(weights * differences**2) / (tokens - 1)
    return differences / math.sqrt(variance + VARIANCE_EPSILON)


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": Estimator(group=grpo),
    "dr_grpo": Estimator(group=centered),
    "rloo": Estimator(group=rloo),
    "reinforce_pp": Estimator(group=unchanged, batch=whiten, needs_variance=False),
    "reinforce_pp_baseline": Estimator(group=centered, batch=whiten),
    "max_rl": Estimator(group=max_rl, min_reward=0.0),
    "pass_at_k": Estimator(group=pass_at_k),
    "pass_at_k_normalised": Estimator(group=pass_at_k_normalised),
    "none": Estimator(group=unchanged, needs_variance=False),
}
"""The built-in estimators, by the name in `advantages.estimator`."""
