"""The section `[advantages]`, and the recipe that its names resolve to."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from headpond.advantages.estimators import ESTIMATORS, Estimator, Whitening, built_in
from headpond.advantages.shaping import (
    Shaping,
    punish_overlong,
    shape_by_tokens,
    shape_by_turns,
    shape_linearly,
    unshaped,
)
from headpond.declarations.named_code import Facts, checked_function, import_attribute, is_custom, lookup, unknown
from headpond.declarations.sections import Reader, Section, read_by
from headpond.errors import ConfigError

SHAPINGS = ("none", "tokens", "turns", "linear", "overlong")
Weight = Annotated[float, Field(ge=0)]


class AdvantageSettings(Section):
    """How rewards become advantages."""

    declared = read_by(Reader.ORCHESTRATOR, Reader.COMPUTE)

    estimator: str = "dr_grpo"
    """Name of the estimator: `grpo`, `grpo_leave_one_out`, `grpo_batch`, `dr_grpo`, `rloo`, `opo`, `remax`,
    `reinforce_pp`, `reinforce_pp_baseline`, `max_rl`, `gdpo`, `pass_at_k`, `pass_at_k_normalised`, `none` (the reward
    itself); by turn `grpo_process`, `grpo_agents`, `rae`; or `module:attribute`: an `Estimator` or a function."""
    whitening: Whitening = "verl"
    """How `reinforce_pp` and `reinforce_pp_baseline` whiten over tokens: as `verl` (variance with n - 1, plus 1e-8), or
    as `nemo_rl` and `openrlhf` (with n, at least 1e-8)."""
    reward_weights: dict[str, float] = Field(default={})
    """Weights of the named rewards under `gdpo`; 1 for names that are not here."""
    baseline_decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the moving mean of an agent's rewards under `rae`."""
    length_shaping: str = "none"
    """`tokens` and `turns` reward the best rollouts of a group for saving these; `linear` lowers each reward by its
    share of the longest rollout's tokens and turns; `overlong` is DAPO's penalty near `overlong_tokens`; or
    `module:function` that maps a group to its shaped rewards."""
    completion_weight: Weight = 1.0
    """Cost of one completion token under `tokens`; weight of a rollout's completion tokens under `linear`."""
    tool_weight: Weight = 1.0
    """Cost of one token of a tool's result under `tokens`."""
    input_weight: Weight = 0.0
    """Weight of a rollout's prompt tokens under `linear`."""
    turn_weight: Weight = 0.0
    """Weight of a rollout's turns under `linear`."""
    overlong_tokens: PositiveInt | None = None
    """Completion tokens from which `overlong` subtracts the whole penalty."""
    overlong_buffer: PositiveInt = 4096
    """Tokens before `overlong_tokens` over which the penalty grows from 0."""
    overlong_penalty: Weight = 1.0
    """What `overlong` subtracts at most."""

    @field_validator("estimator", "length_shaping")
    @classmethod
    def _check_name(cls, name: str, info: ValidationInfo) -> str:
        """Check a built-in name. The processes that import `module:attribute` check a custom
        one."""
        names = ESTIMATORS if info.field_name == "estimator" else SHAPINGS
        if not is_custom(name) and name not in names:
            raise ValueError(unknown(name, names))
        return name

    @model_validator(mode="after")
    def _check_overlong(self) -> "AdvantageSettings":
        if self.length_shaping == "overlong" and (self.overlong_tokens or 0) <= self.overlong_buffer:
            raise ValueError(
                f"length_shaping = 'overlong' needs overlong_tokens above overlong_buffer ({self.overlong_buffer})"
            )
        return self


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
    """Resolve the names in the settings. Code that `module:attribute` names is imported into
    this process."""
    if group_size < 1:
        raise ConfigError(f"group_size is {group_size}: set the number of rollouts that share a baseline, at least 1")
    shapings: dict[str, Shaping] = {
        "none": unshaped,
        "tokens": partial(
            shape_by_tokens, completion_weight=settings.completion_weight, tool_weight=settings.tool_weight
        ),
        "turns": shape_by_turns,
        "linear": partial(
            shape_linearly,
            completion_weight=settings.completion_weight,
            input_weight=settings.input_weight,
            turn_weight=settings.turn_weight,
        ),
        "overlong": partial(
            punish_overlong,
            tokens=settings.overlong_tokens or 0,
            buffer=settings.overlong_buffer,
            penalty=settings.overlong_penalty,
        ),
    }
    estimators = built_in(settings.whitening, weights=settings.reward_weights, decay=settings.baseline_decay)
    return Recipe(
        name=settings.estimator,
        estimator=load_estimator(settings.estimator, estimators),
        shaping=load_shaping(settings.length_shaping, shapings),
        group_size=group_size,
    )


def load_estimator(
    name: str, built_in: Mapping[str, Estimator] = ESTIMATORS, *, setting: str = "advantages.estimator"
) -> Estimator:
    """Return the built-in estimator, or import the `Estimator` or function `module:attribute`."""
    if not is_custom(name):
        return lookup(built_in, name, setting=setting)
    estimator, label = import_attribute(name, setting=setting), f"{setting} = {name!r}"
    if not isinstance(estimator, Estimator):
        return Estimator(group=checked_function(estimator, "group", what=label))
    checked_function(estimator.group, "group", what=f"{label}: `group`")
    if estimator.batch is not None:
        arguments = ("batch",) if estimator.state is None else ("batch", "state")
        advice = ", or give the Estimator a `state`" if estimator.state is None else ""
        checked_function(estimator.batch, *arguments, what=f"{label}: `batch`", advice=advice)
    elif estimator.state is not None:
        raise ConfigError(f"{label} has a state and no batch phase: set `batch`, a function of (batch, state)")
    return estimator


def check_estimator(name: str, *, setting: str) -> Facts:
    return {"batch_phase": load_estimator(name, setting=setting).batch is not None}


def load_shaping(
    name: str, built_in: Mapping[str, Shaping] = {}, *, setting: str = "advantages.length_shaping"
) -> Shaping:
    """Return the built-in shaping, or import `module:function`."""
    if not is_custom(name):
        return lookup(built_in, name, setting=setting)
    return checked_function(import_attribute(name, setting=setting), "group", what=f"{setting} = {name!r}")
