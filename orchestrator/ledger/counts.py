"""Rollouts by state and by reason, dead jobs by cause: counted as they move, in the table `counts`."""

from collections import Counter

from headpond.ledger.queries import DIED
from headpond.ledger.states import RolloutState
from headpond.orchestrator.ledger.rows import JobRecord, Row

CAUSES_MOST = 200
"""Causes of death that are told apart; further ones count as OTHER_CAUSES, so that texts cannot fill the ledger."""
OTHER_CAUSES = "other errors"


class Counts:
    def __init__(self, states: Counter[RolloutState], reasons: Counter[str], deaths: Counter[tuple[str, str]]) -> None:
        """`deaths` is by stage and error. The ledger changes `states` and `reasons`."""
        self._states = states
        self._reasons = reasons
        self._deaths = deaths
        self._written = self._all()

    def died(self, job: JobRecord) -> None:
        cause = (job.stage, job.error or "")
        if cause not in self._deaths and len(self._deaths) >= CAUSES_MOST:
            cause = (job.stage, OTHER_CAUSES)
        self._deaths[cause] += 1

    def changed(self) -> list[Row]:
        """Rows that differ from those of the last call."""
        before, self._written = self._written, self._all()
        return [(*name, number) for name, number in self._written.items() if before.get(name) != number]

    def _all(self) -> dict[tuple[str, str], int]:
        counts = {("state", state.value): number for state, number in self._states.items()}
        counts |= {("reason", reason): number for reason, number in self._reasons.items()}
        return counts | {(f"{DIED}{kind}", error): number for (kind, error), number in self._deaths.items()}
