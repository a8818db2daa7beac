"""Rewards -> advantages, in two phases: a group's as soon as it is complete, a batch's from one scalar a rollout.

Float64 inside, float32 out. Sums are correctly rounded (math.fsum), so that the same rollouts in any order, on any
machine, give the same bits. A group holds every scored rollout, dropped ones included: they count in the baseline.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, StageError
from penstock.filters import rewards_are_equal
from penstock.registry import extend, lookup

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as verl and others do: numbers stay comparable."""
VARIANCE_EPSILON = 1e-8
"""Added to the variance that whitening divides by, likewise."""
MAX_REWARD = 1e30
"""Differences, squares and quotients of rewards up to this size stay finite, also as float32."""
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    estimator: str = "dr_grpo"
    length_shaping: str = "none"
    """`tokens` or `turns` rewards the best rollouts of a group for being shorter than their mean."""
    completion_weight: float = 1.0
    """What one completion token costs under `tokens`."""
    tool_weight: float = 1.0
    """What one token of a tool's answer costs under `tokens`."""

    def __post_init__(self) -> None:
        for name in ("completion_weight", "tool_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"advantages.{name} is {getattr(self, name)}: give a finite cost, 0 or more")


@dataclass(frozen=True, kw_only=True)
class GroupValues:
    """The n scored rollouts of one group, one entry each."""

    rewards: Floats
    completion_tokens: Ints
    tool_tokens: Ints
    input_tokens: Ints
    turns: Ints
    named_rewards: Mapping[str, Floats] = field(default_factory=dict[str, Floats])

    def __post_init__(self) -> None:
        lengths = [len(each) for each in (self.completion_tokens, self.tool_tokens, self.input_tokens, self.turns)]
        lengths += [len(each) for each in self.named_rewards.values()]
        if set(lengths) != {len(self.rewards)} or not lengths[0]:
            raise StageError(f"a group of {len(self.rewards)} rewards has columns of {lengths} entries")


@dataclass(frozen=True, kw_only=True)
class BatchValues:
    """The rollouts of one batch in ledger order, one entry each."""

    values: Floats
    """What the group phase gave."""
    sampled_tokens: Ints
    agents: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.values) != len(self.sampled_tokens):
            raise StageError(f"a batch has {len(self.values)} values, but {len(self.sampled_tokens)} token counts")


Shaping = Callable[[GroupValues], Floats]
"""A group's rewards before the baseline."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    group: Callable[[GroupValues], Floats]
    """Sees shaped rewards."""
    batch: Callable[[BatchValues], Floats] | None = None
    needs_variance: bool = True
    """Learns from differences within a group: equal rewards give exactly 0, and the zero-variance filter applies."""
    min_reward: float = -MAX_REWARD


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings with their names resolved."""

    name: str
    estimator: Estimator
    shaping: Shaping
    group_size: int

    @property
    def needs_variance(self) -> bool:
        return self.estimator.needs_variance and self.group_size > 1

    @property
    def has_batch_phase(self) -> bool:
        return self.estimator.batch is not None


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    values: Floats
    """Final where the estimator has no batch phase, else what that phase takes."""
    shaped: Floats
    """The rewards that the zero-variance filter judges."""


def resolve(
    settings: AdvantageSettings,
    *,
    group_size: int,
    estimators: Mapping[str, Estimator] | None = None,
    shapings: Mapping[str, Shaping] | None = None,
) -> Recipe:
    """`estimators` and `shapings` are the process's own, beside the built-in ones."""
    if group_size < 1:
        raise ConfigError(f"group_size is {group_size}: give the number of rollouts that share a baseline, at least 1")
    known = extend(ESTIMATORS, estimators or {}, setting="advantages.estimator")
    by_tokens = partial(shape_by_tokens, settings)
    ways: dict[str, Shaping] = {"none": unchanged, "tokens": by_tokens, "turns": shape_by_turns}
    ways = extend(ways, shapings or {}, setting="advantages.length_shaping")
    return Recipe(
        name=settings.estimator,
        estimator=lookup(known, settings.estimator, setting="advantages.estimator"),
        shaping=lookup(ways, settings.length_shaping, setting="advantages.length_shaping"),
        group_size=group_size,
    )


def reward_error(reward: float, recipe: Recipe) -> str | None:
    """Why a rollout with this reward has failed, to be asked of each before its group is put together; None if fine."""
    if not abs(reward) <= MAX_REWARD:
        return f"its reward is {reward}: an environment must give a finite number, at most {MAX_REWARD} in size"
    if reward < recipe.estimator.min_reward:
        return f"its reward is {reward}, but {recipe.name} needs at least {recipe.estimator.min_reward}"
    return None


def group_phase(group: GroupValues, recipe: Recipe) -> GroupAdvantages:
    size = len(group.rewards)
    for index, reward in enumerate(group.rewards.tolist()):
        if error := reward_error(reward, recipe):
            raise StageError(f"rollout {index} of a group was to be left out: {error}")
    if size == 1 and recipe.group_size != 1:
        raise StageError(f"one rollout of {recipe.group_size} has no baseline: drop such groups (min_group_size)")
    shaped = _checked(recipe.shaping(group), size, "length shaping")
    if recipe.estimator.needs_variance and size == 1:
        values = shaped
    elif recipe.estimator.needs_variance and rewards_are_equal(shaped):
        values = np.zeros(size)
    else:
        values = _checked(recipe.estimator.group(replace(group, rewards=shaped)), size, recipe.name)
    return GroupAdvantages(values=values, shaped=shaped)


def batch_phase(batch: BatchValues, recipe: Recipe) -> NDArray[np.float32]:
    """The advantages as they are delivered; for an estimator of one phase only a change of type."""
    values = recipe.estimator.batch(batch) if recipe.estimator.batch else batch.values
    return _checked(values, len(batch.values), recipe.name).astype(np.float32)


def _checked(given: Floats, size: int, giver: str) -> Floats:
    values = np.asarray(given, np.float64)
    if values.shape != (size,) or not (np.abs(values) <= FLOAT32_MAX).all():
        raise StageError(f"{giver} gave {given} for {size} rollouts: one finite float32 each is needed")
    return values


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
    apart = batch.values - math.fsum(weights * batch.values) / tokens
    variance = math.fsum(weights * apart**2) / (tokens - 1)
    return apart / math.sqrt(variance + VARIANCE_EPSILON)


def shape_by_tokens(settings: AdvantageSettings, group: GroupValues) -> Floats:
    costs = settings.completion_weight * group.completion_tokens + settings.tool_weight * group.tool_tokens
    return reward_thrift(group.rewards, costs)


def shape_by_turns(group: GroupValues) -> Floats:
    return reward_thrift(group.rewards, group.turns.astype(np.float64))


def reward_thrift(rewards: Floats, costs: Floats) -> Floats:
    """The best rollouts gain up to their reward again by what they cost less than their mean; nobody loses."""
    best = rewards == rewards.max()
    usual = mean(costs[best])
    if rewards.max() <= 0 or usual <= 0:
        return rewards
    return rewards * (1 + best * np.clip(1 - costs / usual, 0, 1))


def mean(values: Floats) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Floats) -> float:
    """With n - 1, as the estimate from a sample that a group is."""
    return math.sqrt(math.fsum((values - mean(values)) ** 2) / (len(values) - 1))


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
