"""The two phases: a group's values as soon as it is complete, a batch's advantages when a step is composed."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.advantages.settings import Recipe
from penstock.advantages.values import MAX_REWARD, BatchValues, Floats, GroupValues
from penstock.errors import StageError
from penstock.filters import rewards_are_equal

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    values: Floats
    """Final where the estimator has no batch phase, else the input of that phase."""
    shaped: Floats
    """The rewards that the zero-variance filter judges."""


def reward_error(reward: float, recipe: Recipe) -> str | None:
    """Why a rollout with this reward has failed, or None. Checked for each rollout before its group is formed."""
    if not abs(reward) <= MAX_REWARD:
        return f"its reward is {reward}: an environment must return a finite number, at most {MAX_REWARD} in size"
    if reward < recipe.estimator.min_reward:
        return f"its reward is {reward}, but {recipe.name} needs at least {recipe.estimator.min_reward}"
    return None


def group_phase(group: GroupValues, recipe: Recipe) -> GroupAdvantages:
    size = len(group.rewards)
    for index, reward in enumerate(group.rewards.tolist()):
        if error := reward_error(reward, recipe):
            raise StageError(f"rollout {index} of a group should have been excluded: {error}")
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
    """The advantages as delivered. Without a batch phase only the type changes."""
    values = recipe.estimator.batch(batch) if recipe.estimator.batch else batch.values
    return _checked(values, len(batch.values), recipe.name).astype(np.float32)


def _checked(result: Floats, size: int, source: str) -> Floats:
    values = np.asarray(result, np.float64)
    if values.shape != (size,) or not (np.abs(values) <= FLOAT32_MAX).all():
        raise StageError(f"{source} gave {result} for {size} rollouts: one finite float32 each is needed")
    return values
