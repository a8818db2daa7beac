"""Which code keeps the event loop from running: a thread looks at the loop's stack whenever the loop is late.

What blocks inside one C call that holds the GIL is seen when the call lets go of it, at the line that made it.
"""

import logging
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger("penstock.lag_trace")

LOOKS_PER_LIMIT = 4  # so that a block a little longer than the limit is seen
SHORTEST_LOOK_S = 0.002  # a look takes some 20 us
NAMES_KEPT = 200  # of different culprits; more are counted under OTHERS
NAMES_SHOWN = 5
OTHERS = "others"
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class LagTrace:
    """`start` is called on the loop's thread; `last_tick` says when the loop last ran, on the monotonic clock."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._blocked_s: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, last_tick: Callable[[], float], interval_s: float) -> None:
        loop_thread = threading.get_ident()
        self._thread = threading.Thread(
            target=self._look_for_ever, args=(loop_thread, last_tick, interval_s), name="lag-trace", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def blockers(self) -> dict[str, float]:
        """What blocked for longer than the limit, and for how many seconds since the start, the worst first."""
        worst_first = sorted(self._blocked_s.copy().items(), key=lambda item: -item[1])
        return {name: round(seconds, 3) for name, seconds in worst_first[:NAMES_SHOWN]}

    def _look_for_ever(self, loop_thread: int, last_tick: Callable[[], float], interval_s: float) -> None:
        pause_s = max(SHORTEST_LOOK_S, self._limit_s / LOOKS_PER_LIMIT)
        looked_at = time.monotonic()
        while not self._stop.wait(pause_s):
            now = time.monotonic()
            due = last_tick() + interval_s
            frames = sys._current_frames() if now - due > self._limit_s else {}  # pyright: ignore[reportPrivateUsage]
            if frame := frames.get(loop_thread):
                self._seen(name_of(frame), since=max(due, looked_at), now=now, first=looked_at <= due + self._limit_s)
            looked_at = now

    def _seen(self, name: str, *, since: float, now: float, first: bool) -> None:
        if name not in self._blocked_s and len(self._blocked_s) >= NAMES_KEPT:
            name = OTHERS
        self._blocked_s[name] = self._blocked_s.get(name, 0.0) + now - since
        if first:
            logger.warning("action=loop_blocked by=%r", name)


def name_of(frame: FrameType) -> str:
    """The innermost frame; behind it, where that is a library's, the line of ours or of the user's that went there."""
    own = frame
    while own.f_code.co_filename.startswith(LIBRARIES) and own.f_back is not None:
        own = own.f_back
    if own is frame or own.f_code.co_filename.startswith(LIBRARIES):
        return _place(frame)
    return f"{_place(own)} in {frame.f_code.co_qualname}"


def _place(frame: FrameType) -> str:
    file = "/".join(frame.f_code.co_filename.rsplit("/", 2)[-2:])
    return f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})"
