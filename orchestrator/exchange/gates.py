"""Gates before submission: closed while the engine or the store is unavailable, probed with one job at a time.

Rollouts need the engine and a writable store; filtering (its fsync), batch phase and encoding need a writable store.
"""

import time

from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.tasks.stage import Outcome

RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0
CAUSES = {
    Outcome.UNREACHABLE: "the engine cannot be reached",
    Outcome.UNWRITTEN: "a worker cannot write to the store: free space or repair the disk",
}


class Gate:
    def __init__(self, troubles: Troubles) -> None:
        self.trouble = troubles.entry()
        self._pause_s = RETRY_FIRST_S
        self._next_try_at = 0.0
        # (job, attempt) submitted to test whether the engine or the store is available
        # again
        self._probe: tuple[str, int] | None = None
        self.closed_by: str | None = None  # the worker that could not reach the engine or the store

    @property
    def open(self) -> bool:
        return self.trouble.text is None

    def close(self, cause: Outcome, job: str, attempt: int, error: str, *, node: str | None = None) -> None:
        """Only the reply of a probe lengthens the pause: other jobs were submitted before the gate closed."""
        if self.trouble.text is None:
            self._pause_s = RETRY_FIRST_S
        elif self._probe == (job, attempt):
            self._pause_s = min(2 * self._pause_s, RETRY_MOST_S)
        else:
            return
        self._probe, self.closed_by = None, node
        self._next_try_at = time.monotonic() + self._pause_s
        self.trouble.text = f"{CAUSES[cause]} ({error}); retried every {self._pause_s:.0f} s, nothing is lost"

    def reopen(self) -> None:
        self.trouble.text = self._probe = self.closed_by = None

    def probe_lost(self, job: str) -> None:
        if self._probe and self._probe[0] == job:
            self._probe = None

    def may_send_probe(self) -> bool:
        return self._probe is None and time.monotonic() >= self._next_try_at

    def probe_sent(self, job: str, attempt: int) -> None:
        self._probe = (job, attempt)


class Gates:
    def __init__(self, troubles: Troubles | None = None) -> None:
        troubles = troubles or Troubles()
        self.rollouts = Gate(troubles)
        # by the name that a stage gives
        self.all = {"rollouts": self.rollouts, "filtering": Gate(troubles), "encoding": Gate(troubles)}

    def worker_excluded(self, node: str) -> None:
        """Reopen the gates that only `node` has closed: the engine and the store may be fine for the others."""
        for gate in self.all.values():
            if gate.closed_by == node:
                gate.reopen()
