"""The result of filtering: modes, matches with their token, a verdict for each rollout, counts over many."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """What happens to a rollout that matches a filter."""

    OFF = "off"
    """The filter does not run."""
    MONITOR = "monitor"
    """Only counted."""
    MASK = "mask"
    """Delivered with loss mask 0, so that the group and the loss's denominator stay the same."""
    DROP = "drop"
    """Not delivered."""


@dataclass(frozen=True, kw_only=True)
class Match:
    filter: str
    mode: Mode
    token: int | None
    """Index into the rollout's tokens; None where the group as a whole matched."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The matches of one rollout, in the order of the filters: those of its tokens + those of its group."""

    matches: tuple[Match, ...] = ()

    def __add__(self, later: "Verdict") -> "Verdict":
        return Verdict(matches=self.matches + later.matches)

    @property
    def drop_reason(self) -> str | None:
        return next((match.filter for match in self.matches if match.mode == Mode.DROP), None)

    @property
    def masked(self) -> bool:
        return self.drop_reason is None and any(match.mode == Mode.MASK for match in self.matches)


@dataclass(frozen=True, kw_only=True)
class Counts:
    matched: Counter[str]
    """Rollouts by filter, in any mode; a rollout counts for every filter that it matches."""
    dropped: Counter[str]
    """Rollouts by drop reason; a rollout counts once."""
    masked: int


def count(verdicts: Iterable[Verdict]) -> Counts:
    matched, dropped, masked = Counter[str](), Counter[str](), 0
    for verdict in verdicts:
        matched.update(match.filter for match in verdict.matches)
        masked += verdict.masked
        if reason := verdict.drop_reason:
            dropped[reason] += 1
    return Counts(matched=matched, dropped=dropped, masked=masked)
