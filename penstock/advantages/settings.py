"""The section `[advantages]`, and the recipe that its names resolve to."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import Field

from penstock.advantages.estimators import ESTIMATORS, Estimator
from penstock.advantages.shaping import Shaping, shape_by_tokens, shape_by_turns, unshaped
from penstock.errors import ConfigError
from penstock.registry import extend, lookup
from penstock.sections import Reader, Section, read_by

Weight = Annotated[float, Field(ge=0)]


class AdvantageSettings(Section):
    """How rewards become advantages."""

    declared = read_by(Reader.ORCHESTRATOR, Reader.COMPUTE)

    estimator: str = "dr_grpo"
    """Name of the estimator: `grpo`, `dr_grpo`, `rloo`, `reinforce_pp`, `reinforce_pp_baseline`, `max_rl`, `pass_at_k`,
    `pass_at_k_normalised`, or `none` (the reward itself)."""
    length_shaping: str = "none"
    """What the best rollouts of a group are rewarded for saving: `tokens`, `turns` or `none`."""
    completion_weight: Weight = 1.0
    """Cost of one completion token under `tokens`."""
    tool_weight: Weight = 1.0
    """Cost of one token of a tool's result under `tokens`."""


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


def resolve(
    settings: AdvantageSettings,
    *,
    group_size: int,
    estimators: Mapping[str, Estimator] | None = None,
    shapings: Mapping[str, Shaping] | None = None,
) -> Recipe:
    """`estimators` and `shapings` are custom ones, beside the built-in ones."""
    if group_size < 1:
        raise ConfigError(f"group_size is {group_size}: set the number of rollouts that share a baseline, at least 1")
    by_tokens = partial(shape_by_tokens, completion_weight=settings.completion_weight, tool_weight=settings.tool_weight)
    built_in: dict[str, Shaping] = {"none": unshaped, "tokens": by_tokens, "turns": shape_by_turns}
    known_estimators = extend(ESTIMATORS, estimators or {}, setting="advantages.estimator")
    known_shapings = extend(built_in, shapings or {}, setting="advantages.length_shaping")
    return Recipe(
        name=settings.estimator,
        estimator=lookup(known_estimators, settings.estimator, setting="advantages.estimator"),
        shaping=lookup(known_shapings, settings.length_shaping, setting="advantages.length_shaping"),
        group_size=group_size,
    )
