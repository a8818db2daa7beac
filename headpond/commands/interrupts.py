"""Ctrl-C and SIGTERM of a command that drives other processes: recorded, and acted on by its main loop."""

import signal
from types import FrameType

STOPPED = {signal.SIGINT: "stopped by Ctrl-C", signal.SIGTERM: "stopped by SIGTERM"}


class Interrupts:
    def __init__(self) -> None:
        self.signals: list[int] = []
        for signum in STOPPED:
            signal.signal(signum, self._record)

    @property
    def twice(self) -> bool:
        return len(self.signals) > 1

    @property
    def why(self) -> str:
        """Empty before the first."""
        return STOPPED[signal.Signals(self.signals[0])] if self.signals else ""

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self.signals.append(signum)
