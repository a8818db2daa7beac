"""Whether rollouts may be submitted: closed while the engine is away, then one rollout tries before the rest follow."""

import time

RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0


class EngineGate:
    def __init__(self) -> None:
        self.trouble: str | None = None
        self._pause_s = RETRY_FIRST_S
        self._next_try_at = 0.0
        self._scout: tuple[str, int] | None = None
        """the job and attempt that is out to see whether the engine is back"""

    @property
    def open(self) -> bool:
        return self.trouble is None

    def unreachable(self, job: str, attempt: int, error: str) -> None:
        """Only a scout's report lengthens the pause: the others left before it was known."""
        if self.trouble is None:
            self._pause_s = RETRY_FIRST_S
        elif self._scout == (job, attempt):
            self._pause_s = min(2 * self._pause_s, RETRY_MOST_S)
        else:
            return
        self._scout = None
        self._next_try_at = time.monotonic() + self._pause_s
        self.trouble = f"the engine cannot be reached ({error}); next try every {self._pause_s:.0f} s, nothing is lost"

    def reached(self) -> None:
        self.trouble = self._scout = None

    def scout_lost(self, job: str) -> None:
        if self._scout and self._scout[0] == job:
            self._scout = None

    def may_send_scout(self) -> bool:
        return self._scout is None and time.monotonic() >= self._next_try_at

    def sent_scout(self, job: str, attempt: int) -> None:
        self._scout = (job, attempt)
