"""The section `[advantages]`, and the recipe that its names resolve to."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from penstock.advantages.estimators import ESTIMATORS, Estimator
from penstock.advantages.loading import load_estimator, load_shaping
from penstock.advantages.shaping import Shaping, shape_by_tokens, shape_by_turns, unshaped
from penstock.errors import ConfigError
from penstock.registry import is_custom, unknown
from penstock.sections import Reader, Section, read_by

SHAPINGS = ("none", "tokens", "turns")
Weight = Annotated[float, Field(ge=0)]


class AdvantageSettings(Section):
    """How rewards become advantages."""

    declared = read_by(Reader.ORCHESTRATOR, Reader.COMPUTE)

    estimator: str = "dr_grpo"
    """Name of the estimator: `grpo`, `dr_grpo`, `rloo`, `reinforce_pp`, `reinforce_pp_baseline`, `max_rl`, `pass_at_k`,
    `pass_at_k_normalised`, `none` (the reward itself), or `module:attribute`: an `Estimator` or a function."""
    length_shaping: str = "none"
    """What the best rollouts of a group are rewarded for saving: `tokens`, `turns` or `none`; or `module:function` that
    maps a group to its shaped rewards."""
    completion_weight: Weight = 1.0
    """Cost of one completion token under `tokens`."""
    tool_weight: Weight = 1.0
    """Cost of one token of a tool's result under `tokens`."""

    @field_validator("estimator", "length_shaping")
    @classmethod
    def _check_name(cls, name: str, info: ValidationInfo) -> str:
        """`module:attribute` is checked by the processes that start with it."""
        built_in = ESTIMATORS if info.field_name == "estimator" else SHAPINGS
        if not is_custom(name) and name not in built_in:
            raise ValueError(unknown(name, built_in))
        return name


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


def resolve(settings: AdvantageSettings, *, group_size: int) -> Recipe:
    """Imports the code that `module:attribute` names into this process."""
    if group_size < 1:
        raise ConfigError(f"group_size is {group_size}: set the number of rollouts that share a baseline, at least 1")
    by_tokens = partial(shape_by_tokens, completion_weight=settings.completion_weight, tool_weight=settings.tool_weight)
    shapings: dict[str, Shaping] = {"none": unshaped, "tokens": by_tokens, "turns": shape_by_turns}
    return Recipe(
        name=settings.estimator,
        estimator=load_estimator(settings.estimator),
        shaping=load_shaping(settings.length_shaping, shapings),
        group_size=group_size,
    )
