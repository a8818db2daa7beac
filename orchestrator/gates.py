"""Whether jobs may be submitted: closed while what they need is away, then one of them tries before the rest follow.

Rollouts need the engine and a store that takes their files, encoding the store.
"""

import time

from penstock.ledger.states import JobKind
from penstock.messages import Outcome

RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0


CAUSES = {
    Outcome.UNREACHABLE: "the engine cannot be reached",
    Outcome.UNWRITTEN: "a worker cannot write to the store: make room or mend its disk",
}


class Gate:
    def __init__(self) -> None:
        self.trouble: str | None = None
        self._pause_s = RETRY_FIRST_S
        self._next_try_at = 0.0
        self._scout: tuple[str, int] | None = None
        """the job and attempt that is out to see whether it is back"""

    @property
    def open(self) -> bool:
        return self.trouble is None

    def missed(self, cause: Outcome, job: str, attempt: int, error: str) -> None:
        """Only a scout's report lengthens the pause: the others left before it was known."""
        if self.trouble is None:
            self._pause_s = RETRY_FIRST_S
        elif self._scout == (job, attempt):
            self._pause_s = min(2 * self._pause_s, RETRY_MOST_S)
        else:
            return
        self._scout = None
        self._next_try_at = time.monotonic() + self._pause_s
        self.trouble = f"{CAUSES[cause]} ({error}); next try every {self._pause_s:.0f} s, nothing is lost"

    def reached(self) -> None:
        self.trouble = self._scout = None

    def scout_lost(self, job: str) -> None:
        if self._scout and self._scout[0] == job:
            self._scout = None

    def may_send_scout(self) -> bool:
        return self._scout is None and time.monotonic() >= self._next_try_at

    def sent_scout(self, job: str, attempt: int) -> None:
        self._scout = (job, attempt)


class Gates:
    def __init__(self) -> None:
        self.rollouts = Gate()
        self.encoding = Gate()

    def of(self, kind: JobKind) -> Gate | None:
        return {JobKind.ROLLOUT: self.rollouts, JobKind.ENCODE: self.encoding}.get(kind)

    @property
    def troubles(self) -> list[str]:
        return [gate.trouble for gate in (self.rollouts, self.encoding) if gate.trouble]

    def scout_lost(self, kind: JobKind, job: str) -> None:
        if gate := self.of(kind):
            gate.scout_lost(job)
