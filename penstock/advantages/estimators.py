"""The estimators: a function of a group's shaped rewards, and for some a function of the batch's values.

`advantages.estimator = "module:attribute"` names one of your own: an `Estimator`, or a function for its group phase.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from penstock.advantages import formulas, turn_formulas
from penstock.advantages.formulas import Whitening
from penstock.advantages.values import MAX_REWARD, BatchValues, Floats, GroupValues


@dataclass(frozen=True, kw_only=True)
class Estimator:
    group: Callable[[GroupValues], Floats] | Callable[[GroupValues], Sequence[Floats]]
    """Maps a group with shaped rewards to one value a rollout; with `per_turn`, to one array of values a rollout."""
    batch: Callable[[BatchValues], Any] | Callable[[BatchValues, Any], tuple[Any, Any]] | None = None
    """Maps the values of a whole batch to advantages; None where the group's values are final."""
    state: Any = None
    """The state before the first step: anything that JSON can hold, None for no state. With a state, `batch` takes
    (values, state) and returns (advantages, next state). The next state is kept with the step: a step that is formed
    again starts from the state before it."""
    needs_variance: bool = True
    """The values are differences within a group: equal rewards give exactly 0, and the zero-variance filter applies."""
    variance_of: Literal["rewards", "values"] = "rewards"
    """What must differ: the shaped rewards, or the values that `group` returns."""
    per_turn: bool = False
    """Both functions return a sequence with one array for each rollout, which has one value for each of its turns."""
    min_reward: float = -MAX_REWARD


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The settings of `[advantages]` that built-in estimators use."""

    whitening: Whitening = "verl"
    reward_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    baseline_decay: float = 0.95


def built_in(parameters: Parameters) -> dict[str, Estimator]:
    """The built-in estimators, by the name in `advantages.estimator`."""
    whiten = formulas.whitening(parameters.whitening)
    gdpo = partial(formulas.gdpo, weights=parameters.reward_weights)
    rae = partial(turn_formulas.rae, decay=parameters.baseline_decay)
    return {
        "grpo": Estimator(group=formulas.grpo),
        "grpo_leave_one_out": Estimator(group=formulas.grpo_leave_one_out),
        "grpo_batch": Estimator(group=formulas.centered, batch=formulas.scaled_by_batch),
        "dr_grpo": Estimator(group=formulas.centered),
        "rloo": Estimator(group=formulas.rloo),
        "opo": Estimator(group=formulas.opo),
        "remax": Estimator(group=formulas.remax, needs_variance=False),
        "reinforce_pp": Estimator(group=formulas.unchanged, batch=whiten, needs_variance=False),
        "reinforce_pp_baseline": Estimator(group=formulas.centered, batch=whiten),
        "max_rl": Estimator(group=formulas.max_rl, min_reward=0.0),
        "gdpo": Estimator(group=gdpo, batch=formulas.standardised, variance_of="values"),
        "pass_at_k": Estimator(group=formulas.pass_at_k),
        "pass_at_k_normalised": Estimator(group=formulas.pass_at_k_normalised),
        "grpo_process": Estimator(group=turn_formulas.grpo_process, per_turn=True, variance_of="values"),
        "grpo_agents": Estimator(group=turn_formulas.grpo_agents, per_turn=True, variance_of="values"),
        "rae": Estimator(group=turn_formulas.by_agent, batch=rae, state={}, per_turn=True, needs_variance=False),
        "none": Estimator(group=formulas.unchanged, needs_variance=False),
    }


ESTIMATORS: Mapping[str, Estimator] = built_in(Parameters())
"""The built-in estimators with default parameters."""
