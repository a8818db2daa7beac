"""The two phases. A group's values are computed as soon as it is complete, a batch's advantages
when a step is composed."""

import copy
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headpond.advantages.settings import Recipe
from headpond.advantages.values import MAX_REWARD, BatchValues, Floats, GroupValues, TurnValues, token_means
from headpond.declarations.named_code import named_state, pair, read_state
from headpond.errors import StageError, error_boundary
from headpond.filters import rewards_are_equal

FLOAT32_MAX = float(np.finfo(np.float32).max)
# The state is stored in the ledger and in every manifest. 1 MiB holds a baseline for each of 40,000
# examples.
STATE_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    values: Floats
    """Final if the estimator has no batch phase, else the input of that phase."""
    shaped: Floats
    """The rewards after length shaping."""
    judged: Floats
    """Compared by the zero-variance filter: the shaped rewards, or the values."""
    by_turn: tuple[Floats, ...] | None = None
    """The values of each rollout's turns, with `per_turn`. Their mean over tokens is the
    rollout's entry in `values`."""


@dataclass(frozen=True, kw_only=True)
class BatchAdvantages:
    values: NDArray[np.float32]
    """The advantages as delivered."""
    state: str | None
    """The estimator's next state with its name, as JSON text; None without a state. Only this
    module reads it."""
    by_turn: tuple[Floats, ...] | None = None
    """See GroupAdvantages."""


def reward_error(reward: float, recipe: Recipe) -> str | None:
    """Explain why a rollout with this reward has failed, or return None. Each rollout is checked
    before its group is formed."""
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
    with error_boundary(StageError, "advantages.length_shaping failed"):
        shaped = _checked(recipe.shaping(group), size, "length shaping")
    estimator, values, by_turn = recipe.estimator, shaped, None
    of_rewards = estimator.needs_variance and estimator.variance_of == "rewards"
    if estimator.needs_variance and size == 1:
        by_turn = _spread(values, group) if estimator.per_turn else None
    elif of_rewards and rewards_are_equal(shaped):
        values = np.zeros(size)
        by_turn = _spread(values, group) if estimator.per_turn else None
    else:
        with error_boundary(StageError, f"the estimator {recipe.name} failed in its group phase"):
            values, by_turn = _values(estimator.group(replace(group, rewards=shaped)), group.by_turn, size, recipe)
    judged = shaped if estimator.variance_of == "rewards" else _flat(values, by_turn)
    return GroupAdvantages(values=values, shaped=shaped, judged=judged, by_turn=by_turn)


def batch_phase(batch: BatchValues, recipe: Recipe, state: str | None = None) -> BatchAdvantages:
    """Compute the advantages of a batch. `state` comes from the step before, None for the first
    step. Without a batch phase only the type changes."""
    compute, size = cast(Any, recipe.estimator.batch), len(batch.values)
    with error_boundary(StageError, f"the estimator {recipe.name} failed in its batch phase"):
        if compute is None:
            return BatchAdvantages(values=_checked(batch.values, size, recipe.name).astype(np.float32), state=None)
        if recipe.estimator.state is None:
            result, state_text = compute(batch), None
        else:
            before = read_state(state, kind="estimator", name=recipe.name, first=copy.deepcopy(recipe.estimator.state))
            result, after = pair(compute(batch, before), "advantages", label=f"the batch phase of {recipe.name}")
            state_text = named_state(
                after, kind="estimator", name=recipe.name, label=recipe.name, limit=STATE_LIMIT_BYTES
            )
        values, by_turn = _values(result, batch.by_turn, size, recipe)
        return BatchAdvantages(values=values.astype(np.float32), state=state_text, by_turn=by_turn)


def _values(
    result: Any, turns: tuple[TurnValues, ...], size: int, recipe: Recipe
) -> tuple[Floats, tuple[Floats, ...] | None]:
    """Check an estimator's result: one value a rollout, or with `per_turn` one array of turn
    values a rollout."""
    if not recipe.estimator.per_turn:
        return _checked(result, size, recipe.name), None
    if len(result) != size:
        raise StageError(f"{recipe.name} gave {len(result)} arrays for {size} rollouts: one a rollout is needed")
    by_turn = tuple(
        _checked(values, len(turn.tokens), recipe.name, "turns") for values, turn in zip(result, turns, strict=True)
    )
    return token_means(by_turn, turns), by_turn


def _spread(values: Floats, group: GroupValues) -> tuple[Floats, ...]:
    return tuple(np.full(len(turns.tokens), value) for value, turns in zip(values, group.by_turn, strict=True))


def _flat(values: Floats, by_turn: tuple[Floats, ...] | None) -> Floats:
    """Flatten the turn values and append a 0. They then count as equal only if all of them are
    0."""
    return values if by_turn is None else np.concatenate([*by_turn, np.zeros(1)])


def _checked(result: Floats, size: int, source: str, unit: str = "rollouts") -> Floats:
    values = np.asarray(result, np.float64)
    if values.shape != (size,) or not (np.abs(values) <= FLOAT32_MAX).all():
        raise StageError(f"{source} gave {result} for {size} {unit}: one finite float32 each is needed")
    return values
