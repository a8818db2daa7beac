"""The formulas of estimators with one value a rollout: of a group, and of a whole batch."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from penstock.advantages.values import BatchValues, Floats, GroupValues, deviation, mean
from penstock.errors import StageError
from penstock.filters import rewards_are_equal

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, with the value that verl and others use: results stay comparable."""
BATCH_STD_EPSILON = 1e-4
"""Added to the standard deviation of a batch's rewards, with the value that TRL uses."""
VARIANCE_EPSILON = 1e-8
"""Added to the variance that whitening divides by (verl), or its least value (NeMo-RL, OpenRLHF)."""
GREEDY = "greedy"
"""The named reward that `remax` subtracts: that of a greedy completion."""
Whitening = Literal["verl", "nemo_rl", "openrlhf"]


def unchanged(group: GroupValues) -> Floats:
    return group.rewards


def centered(group: GroupValues) -> Floats:
    return group.rewards - mean(group.rewards)


def grpo(group: GroupValues) -> Floats:
    return centered(group) / (deviation(group.rewards) + STD_EPSILON)


def grpo_leave_one_out(group: GroupValues) -> Floats:
    """As NeMo-RL: mean and deviation of the other rollouts; undivided where these are equal."""
    values = np.zeros(len(group.rewards))
    for index, reward in enumerate(group.rewards):
        others = np.delete(group.rewards, index)
        differ = len(others) > 1 and not rewards_are_equal(others)
        values[index] = (reward - mean(others)) / (deviation(others) + STD_EPSILON if differ else 1.0)
    return values


def rloo(group: GroupValues) -> Floats:
    size = len(group.rewards)
    return centered(group) * size / (size - 1)


def opo(group: GroupValues) -> Floats:
    """The baseline that is optimal if gradients grow with length: the mean reward of a completion token."""
    tokens = int(group.completion_tokens.sum())
    if not tokens:
        return centered(group)
    return group.rewards - math.fsum(group.rewards * group.completion_tokens) / tokens


def remax(group: GroupValues) -> Floats:
    greedy = group.named_rewards.get(GREEDY, np.full(len(group.rewards), np.nan))
    if np.isnan(greedy).any():
        raise StageError(f'remax needs the reward of a greedy completion: return Score(rewards={{"{GREEDY}": ...}})')
    return group.rewards - greedy


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


def gdpo(group: GroupValues, *, weights: Mapping[str, float]) -> Floats:
    """Each named reward normalised as by `grpo`, then their weighted sum."""
    if len(group.named_rewards) < 2:
        raise StageError(f"gdpo needs two or more named rewards, the scores have {sorted(group.named_rewards)}")
    if unknown := sorted(weights.keys() - group.named_rewards.keys()):
        raise StageError(f"advantages.reward_weights names {unknown}, which no score of the group has")
    values = np.zeros(len(group.rewards))
    for name, rewards in sorted(group.named_rewards.items()):
        if np.isnan(rewards).any():
            raise StageError(f"gdpo needs the named reward {name!r} of every rollout: return it in every Score")
        if not rewards_are_equal(rewards):
            values += weights.get(name, 1.0) * (rewards - mean(rewards)) / (deviation(rewards) + STD_EPSILON)
    return values


def standardised(batch: BatchValues) -> Floats:
    """Mean 0 and standard deviation 1 over the rollouts of the batch, as NeMo-RL's GDPO."""
    if len(batch.values) < 2:
        return np.zeros(len(batch.values))
    spread = deviation(batch.values)
    return (batch.values - mean(batch.values)) / (spread if spread > 0 else 1.0)


def scaled_by_batch(batch: BatchValues) -> Floats:
    """As TRL's `scale_rewards="batch"`: divided by the standard deviation of all rewards of the batch."""
    if len(batch.rewards) < 2:
        return np.zeros(len(batch.values))
    return batch.values / (deviation(batch.rewards) + BATCH_STD_EPSILON)


def whiten(batch: BatchValues, *, corrected: bool, added: bool) -> Floats:
    """Mean 0 and variance 1 over the batch's sampled tokens, each of which carries its rollout's value.

    `corrected`: the variance has n - 1 (Bessel). `added`: VARIANCE_EPSILON is added to it; else it is at least that.
    """
    weights, tokens = batch.sampled_tokens, int(batch.sampled_tokens.sum())
    if tokens < 2:
        return np.zeros(len(batch.values))
    differences = batch.values - math.fsum(weights * batch.values) / tokens
    variance = math.fsum(weights * differences**2) / (tokens - 1 if corrected else tokens)
    return differences / math.sqrt(variance + VARIANCE_EPSILON if added else max(variance, VARIANCE_EPSILON))


def whitening(by: Whitening) -> Callable[[BatchValues], Floats]:
    """As the named framework does it."""

    def whitened(batch: BatchValues) -> Floats:
        return whiten(batch, corrected=by == "verl", added=by == "verl")

    return whitened
