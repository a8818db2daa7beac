"""Builds the filters that the settings select, and applies them. A verdict lists the filters
that a rollout or a group matched. Custom rules are imported from `module:function`."""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from pydantic import Field, model_validator

from headpond.declarations.named_code import checked_function, import_attribute
from headpond.declarations.sections import Reader, Section, read_by
from headpond.errors import ConfigError, StageError, described, error_boundary
from headpond.filters.rules import (
    Difficulty,
    FindToken,
    Gibberish,
    GroupRewards,
    MatchGroup,
    Mode,
    Overlong,
    Repetition,
    RolloutTokens,
    Stale,
    ZeroVariance,
)

BUILT_IN = ("gibberish", "repetition", "overlong", "stale", "zero_variance", "difficulty")
FilterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")]
Rule = TypeVar("Rule")


class CustomFilter(Section):
    """A token filter of your own."""

    use: str
    """`module:function` that maps a `RolloutTokens` (`headpond.filters`) to the index of a matching token, or None."""
    mode: Mode = Mode.MONITOR
    """What happens to a matching rollout: `off`, `monitor` (count), `mask` (no loss) or `drop`."""


class CustomGroupFilter(Section):
    """A group filter of your own."""

    use: str
    """`module:function` that maps a `GroupRewards` (`headpond.filters`) to whether the group matches."""
    mode: Mode = Mode.MONITOR
    """What happens to the rollouts of a matching group: `off`, `monitor` (count), `mask` (no loss) or `drop`."""


class FilterSettings(Section):
    """Filters over rollouts and groups, in the order in which the first that drops names the reason."""

    declared = read_by(Reader.COMPUTE)

    gibberish: Gibberish = Gibberish()
    repetition: Repetition = Repetition()
    overlong: Overlong = Overlong()
    stale: Stale = Stale()
    zero_variance: ZeroVariance = ZeroVariance()
    difficulty: Difficulty = Difficulty()
    custom: dict[FilterName, CustomFilter] = Field(default={})
    """Token filters of your own, by the name that drops and metrics use."""
    custom_groups: dict[FilterName, CustomGroupFilter] = Field(default={})
    """Group filters of your own, by the name that drops and metrics use."""

    @model_validator(mode="after")
    def _check_names(self) -> "FilterSettings":
        names = Counter([*BUILT_IN, *self.custom, *self.custom_groups])
        if repeated := [name for name, times in names.items() if times > 1]:
            raise ValueError(f"{', '.join(repeated)} names two filters; rename the custom one")
        return self


@dataclass(frozen=True, kw_only=True)
class Filter(Generic[Rule]):
    name: str
    mode: Mode
    rule: Rule


def rollout_filters(settings: FilterSettings, *, vocab_size: int) -> tuple[Filter[FindToken], ...]:
    """List the token filters whose mode is not off, in order."""
    if settings.gibberish.mode != Mode.OFF and vocab_size < 1:
        raise ConfigError(f"filters.gibberish needs the model's vocab_size, not {vocab_size}: set it, or mode = 'off'")
    built_in: list[Filter[FindToken]] = [
        Filter(
            name="gibberish",
            mode=settings.gibberish.mode,
            rule=partial(settings.gibberish.find, vocab_size=vocab_size),
        ),
        Filter(name="repetition", mode=settings.repetition.mode, rule=settings.repetition.find),
        Filter(name="overlong", mode=settings.overlong.mode, rule=settings.overlong.find),
        Filter(name="stale", mode=settings.stale.mode, rule=settings.stale.find),
    ]
    custom_filters = [
        Filter(name=name, mode=custom.mode, rule=load_token_rule(custom.use, setting=f"filters.custom.{name}.use"))
        for name, custom in settings.custom.items()
        if custom.mode != Mode.OFF
    ]
    return tuple(token_filter for token_filter in [*built_in, *custom_filters] if token_filter.mode != Mode.OFF)


def group_filters(settings: FilterSettings, *, needs_variance: bool) -> tuple[Filter[MatchGroup], ...]:
    """List the group filters whose mode is not off, in order. `needs_variance`: see
    `advantages.Recipe`."""
    variance_mode = settings.zero_variance.mode if needs_variance else Mode.OFF
    built_in: list[Filter[MatchGroup]] = [
        Filter(name="zero_variance", mode=variance_mode, rule=settings.zero_variance.matches),
        Filter(name="difficulty", mode=settings.difficulty.mode, rule=settings.difficulty.matches),
    ]
    custom_filters = [
        Filter(
            name=name, mode=custom.mode, rule=load_group_rule(custom.use, setting=f"filters.custom_groups.{name}.use")
        )
        for name, custom in settings.custom_groups.items()
        if custom.mode != Mode.OFF
    ]
    return tuple(group_filter for group_filter in [*built_in, *custom_filters] if group_filter.mode != Mode.OFF)


@dataclass(frozen=True, kw_only=True)
class Match:
    filter: str
    mode: Mode
    token: int | None
    """Index into the rollout's tokens, or None if the group as a whole matched."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The matches of one rollout or one group, in the order of the filters."""

    matches: tuple[Match, ...] = ()

    @property
    def drop_reason(self) -> str | None:
        return next((match.filter for match in self.matches if match.mode == Mode.DROP), None)

    @property
    def masked(self) -> bool:
        return self.drop_reason is None and any(match.mode == Mode.MASK for match in self.matches)


def judge(rollout: RolloutTokens, filters: Sequence[Filter[FindToken]]) -> Verdict:
    tokens = [(token_filter, token_filter.rule(rollout)) for token_filter in filters]
    return Verdict(
        matches=tuple(Match(filter=f.name, mode=f.mode, token=int(token)) for f, token in tokens if token is not None)
    )


def judge_group(group: GroupRewards, filters: Sequence[Filter[MatchGroup]]) -> Verdict:
    """Judge the group once: all its rollouts share the verdict."""
    return Verdict(matches=tuple(Match(filter=f.name, mode=f.mode, token=None) for f in filters if f.rule(group)))


def count_matches(verdicts: Iterable[Verdict]) -> Counter[str]:
    """Count the rollouts that matched each filter, in any mode. One rollout may count for
    several filters."""
    return Counter(match.filter for verdict in verdicts for match in verdict.matches)


def load_token_rule(use: str, *, setting: str) -> FindToken:
    rule = checked_function(import_attribute(use, setting=setting), "rollout", what=f"{setting} = {use!r}")

    def find(rollout: RolloutTokens) -> int | None:
        with error_boundary(StageError, f"the filter {use} failed"):
            token = rule(rollout)
            return None if token is None else _index(token, len(rollout.input_ids), use)

    return find


def load_group_rule(use: str, *, setting: str) -> MatchGroup:
    rule = checked_function(import_attribute(use, setting=setting), "group", what=f"{setting} = {use!r}")

    def matches(group: GroupRewards) -> bool:
        with error_boundary(StageError, f"the filter {use} failed"):
            matched = rule(group)
            if not isinstance(matched, bool | np.bool_):
                raise StageError(f"the filter {use} returned {described(matched)}: it must return True or False")
            return bool(matched)

    return matches


def _index(token: Any, tokens: int, use: str) -> int:
    """Check a custom rule's index. A rollout without tokens may match at 0, as with the built-in
    rules."""
    try:
        index = -1 if isinstance(token, bool) else operator.index(token)
    except TypeError:
        index = -1
    if not 0 <= index < max(tokens, 1):
        returned = f"{described(token)} for {tokens} tokens"
        raise StageError(f"the filter {use} returned {returned}: it must return the index of a token, or None")
    return index
