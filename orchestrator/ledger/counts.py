"""Rollouts by state and by reason, those of evaluations, dead jobs by cause: counted as they move, in `counts`."""

from collections import Counter

from headpond.ledger.queries import DIED, Counted
from headpond.orchestrator.ledger.rows import Row

# Causes of death that are told apart; further ones count as OTHER_CAUSES, so that texts cannot
# fill the ledger.
CAUSES_MOST = 200
OTHER_CAUSES = "other errors"


class Counts:
    def __init__(self, counted: Counted, deaths: Counter[tuple[str, str]]) -> None:
        """`deaths` is by stage and error. The ledger changes `counted`."""
        self._by_kind = {"state": counted.states, "reason": counted.reasons, "evaluation": counted.evaluation}
        self._deaths = deaths
        self._written = self._all()

    def died(self, kind: str, error: str | None) -> None:
        cause = (kind, error or "")
        if cause not in self._deaths and len(self._deaths) >= CAUSES_MOST:
            cause = (kind, OTHER_CAUSES)
        self._deaths[cause] += 1

    def changed(self) -> list[Row]:
        """Rows that differ from those of the last call."""
        before, self._written = self._written, self._all()
        return [(*name, number) for name, number in self._written.items() if before.get(name) != number]

    def _all(self) -> dict[tuple[str, str], int]:
        counts = {(kind, str(name)): number for kind, names in self._by_kind.items() for name, number in names.items()}
        return counts | {(f"{DIED}{kind}", error): number for (kind, error), number in self._deaths.items()}
