"""The result of filtering: modes, matches with their token, the verdict on a rollout or a group, counts over many."""

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
    """The matches of one rollout, or of one group, in the order of the filters."""

    matches: tuple[Match, ...] = ()

    @property
    def drop_reason(self) -> str | None:
        return next((match.filter for match in self.matches if match.mode == Mode.DROP), None)

    @property
    def masked(self) -> bool:
        return self.drop_reason is None and any(match.mode == Mode.MASK for match in self.matches)


def count_matches(verdicts: Iterable[Verdict]) -> Counter[str]:
    """Rollouts by filter, in any mode; a rollout counts for every filter that it matches."""
    return Counter(match.filter for verdict in verdicts for match in verdict.matches)
