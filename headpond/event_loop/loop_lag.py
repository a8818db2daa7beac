"""Measures how late the event loop of this process runs. `LoopLag` samples and logs; `LagTrace`
names blocking code.

Sampling awaits nothing but the loop itself. `lag_summaries` defines the published summary.
"""

import asyncio
import logging
import math
import sys
import sysconfig
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headpond.event_loop.lag_summaries import LagSummary, Publish

logger = logging.getLogger("headpond.loop_lag")

# A lag above this counts as blocked time. Two idle loops on a busy 2-core machine differ by up to 14 ms in p99.
BLOCKED_ABOVE_S = 0.02
# `drain` returns at most this many samples: an hour at 20 Hz, 0.6 MB.
MAX_UNREAD_SAMPLES = 72_000

# The interval is short enough to follow a short run. Each publication is one small SET.
PUBLISH_INTERVAL_S = 2.0
# Publications must not pile up while Redis does not answer. The next one is newer.
PUBLISH_TIMEOUT_S = 5.0

CHECKS_PER_LIMIT = 4  # Checks are frequent enough to catch blocks slightly longer than the limit.
MIN_CHECK_INTERVAL_S = 0.002  # A check takes about 20 us.
MAX_BLOCKERS = 200  # Further names are counted as OTHERS.
BLOCKERS_SHOWN = 5
PLACE_CHARACTERS = 300  # Limit for a worker's blocked code in a status.
OTHERS = "others"
# A window above any of these limits is logged as a warning.
LIMITS_S = {"p90_s": 0.05, "p99_s": 0.25, "max_s": 1.0}
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class LagTrace:
    """A thread that inspects the loop's stack while the loop is late. It sums up the time by the
    code that blocks."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._blocked_s: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, last_tick: Callable[[], float], interval_s: float) -> None:
        """Start on the loop's thread. `last_tick` returns when the loop last ran, on the
        monotonic clock."""
        loop_thread = threading.get_ident()
        self._thread = threading.Thread(
            target=self._watch, args=(loop_thread, last_tick, interval_s), name="lag-trace", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def blockers(self) -> dict[str, float]:
        """Map code that blocked for longer than the limit -> seconds since the start, the worst
        first."""
        worst_first = sorted(self._blocked_s.copy().items(), key=lambda item: -item[1])
        return {name: round(seconds, 3) for name, seconds in worst_first[:BLOCKERS_SHOWN]}

    def _watch(self, loop_thread: int, last_tick: Callable[[], float], interval_s: float) -> None:
        pause_s = max(MIN_CHECK_INTERVAL_S, self._limit_s / CHECKS_PER_LIMIT)
        checked_at = time.monotonic()
        while not self._stop.wait(pause_s):
            checked_now = time.monotonic()
            due = last_tick() + interval_s
            frames = sys._current_frames() if checked_now - due > self._limit_s else {}  # pyright: ignore[reportPrivateUsage]
            if frame := frames.get(loop_thread):
                first = checked_at <= due + self._limit_s
                self._add(blocker_name(frame), since=max(due, checked_at), now=checked_now, first=first)
            checked_at = checked_now

    def _add(self, name: str, *, since: float, now: float, first: bool) -> None:
        if name not in self._blocked_s and len(self._blocked_s) >= MAX_BLOCKERS:
            name = OTHERS
        self._blocked_s[name] = self._blocked_s.get(name, 0.0) + now - since
        if first:
            logger.warning("action=loop_blocked by=%r", name)


def blocker_name(frame: FrameType) -> str:
    """Name the innermost frame. If that is in a library, the innermost frame outside libraries
    comes first."""
    caller = frame
    while caller.f_code.co_filename.startswith(LIBRARIES) and caller.f_back is not None:
        caller = caller.f_back
    if caller is frame or caller.f_code.co_filename.startswith(LIBRARIES):
        return _location(frame)
    return f"{_location(caller)} in {frame.f_code.co_qualname}"


def _location(frame: FrameType) -> str:
    file = "/".join(frame.f_code.co_filename.rsplit("/", 2)[-2:])
    return f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})"


class _Sample(NamedTuple):
    at: float
    lag_s: float
    wall_s: float
    cpu_s: float


@dataclass(kw_only=True)
class _UnreadSamples:
    lags_s: "array[float]" = field(default_factory=lambda: array("d"))
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def add(self, sample: _Sample) -> None:
        self.lags_s.append(sample.lag_s)
        self.wall_s += sample.wall_s
        self.cpu_s += sample.cpu_s
        if len(self.lags_s) > MAX_UNREAD_SAMPLES:
            del self.lags_s[: MAX_UNREAD_SAMPLES // 2]


class LoopLag:
    """Sleeps `interval_s` repeatedly and records how much later it wakes."""

    def __init__(
        self,
        *,
        process: str,
        interval_s: float = 0.05,
        window_s: float = 10.0,
        publish: Publish | None = None,
        trace: LagTrace | None = None,
    ) -> None:
        self.last_tick = time.monotonic()
        self._process = process
        self._interval_s = interval_s
        self._window_s = window_s
        self._publish = publish
        self._trace = trace
        # A list, not a deque: other threads copy it while the loop appends, and copying a deque
        # then may fail.
        self._samples: list[_Sample] = []
        self._samples_max = math.ceil(window_s / interval_s) + 2
        self._unread = _UnreadSamples()

    async def run(self) -> None:
        """Sample until cancelled."""
        if self._trace:
            self._trace.start(lambda: self.last_tick, self._interval_s)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._sample_forever())
                # Publishing has its own task: a hanging Redis must not look like a hanging loop.
                if self._publish is not None:
                    group.create_task(self._publish_forever(self._publish))
        finally:
            if self._trace:
                self._trace.stop()

    def summary(self) -> LagSummary:
        """Summarise the last `window_s`. A call from another thread includes a block that has
        not ended."""
        read_at = time.monotonic()
        return self._summarise(since=read_at - self._window_s, overdue_s=read_at - self.last_tick - self._interval_s)

    def drain(self) -> LagSummary:
        """Summarise up to MAX_UNREAD_SAMPLES since the last call. Call it on the loop's thread."""
        unread, self._unread = self._unread, _UnreadSamples()
        return self._summary(unread.lags_s, wall_s=unread.wall_s, cpu_s=unread.cpu_s)

    async def _sample_forever(self) -> None:
        self.last_tick = reported = time.monotonic()
        cpu = time.thread_time()
        while True:
            await asyncio.sleep(self._interval_s)
            woke_at, cpu_before, cpu = time.monotonic(), cpu, time.thread_time()
            self._record(_Sample(woke_at, self._lag_s(woke_at), woke_at - self.last_tick, cpu - cpu_before))
            self.last_tick = woke_at
            if woke_at - reported >= self._window_s:
                self._log(self._summarise(since=reported))
                reported = woke_at

    def _lag_s(self, woke_at: float) -> float:
        # A loop's timers may fire a clock tick early.
        return max(0.0, woke_at - self.last_tick - self._interval_s)

    def _record(self, sample: _Sample) -> None:
        self._unread.add(sample)
        self._samples.append(sample)
        if len(self._samples) >= 2 * self._samples_max:
            self._samples = self._samples[-self._samples_max :]

    def _summarise(self, *, since: float, overdue_s: float = 0.0) -> LagSummary:
        samples = [sample for sample in self._samples.copy() if sample.at > since]
        lags_s = [sample.lag_s for sample in samples]
        if overdue_s > BLOCKED_ABOVE_S:
            lags_s.append(overdue_s)
        return self._summary(
            lags_s,
            wall_s=sum(sample.wall_s for sample in samples),
            cpu_s=sum(sample.cpu_s for sample in samples),
            overdue_s=max(0.0, overdue_s),
        )

    def _summary(
        self, lags_s: "list[float] | array[float]", *, wall_s: float, cpu_s: float, overdue_s: float = 0.0
    ) -> LagSummary:
        lags = np.sort(np.array(lags_s or [0.0], np.float64))
        return LagSummary(
            process=self._process,
            samples=len(lags_s),
            window_s=wall_s + overdue_s,
            min_s=float(lags[0]),
            mean_s=float(lags.mean()),
            median_s=_quantile(lags, 0.5),
            p90_s=_quantile(lags, 0.9),
            p99_s=_quantile(lags, 0.99),
            max_s=float(lags[-1]),
            # Percentiles count a long block as one sample. This sum carries its length.
            blocked_s=float(lags[lags > BLOCKED_ABOVE_S].sum()),
            cpu_share=cpu_s / wall_s if wall_s else 0.0,
            blockers=self._trace.blockers() if self._trace else {},
        )

    def _log(self, summary: LagSummary) -> None:
        exceeded = [name for name, limit_s in LIMITS_S.items() if getattr(summary, name) > limit_s]
        values = {
            name: f"{value:.4f}" if isinstance(value, float) else value
            for name, value in asdict(summary).items()
            if name != "blockers"  # LagTrace has logged each blocker.
        }
        if exceeded:
            values["above_limit"] = ",".join(exceeded)
        line = " ".join(f"{name}={value}" for name, value in values.items())
        logger.log(logging.WARNING if exceeded else logging.INFO, "action=loop_lag %s", line)

    async def _publish_forever(self, publish: Publish) -> None:
        failing = False
        while True:
            await asyncio.sleep(min(self._window_s, PUBLISH_INTERVAL_S))
            try:
                async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                    await publish(self.summary())
            except Exception as error:  # noqa: BLE001 - a failing publisher must not end the sampling
                if not failing:
                    logger.warning("action=loop_lag_unpublished process=%s error=%r", self._process, error)
                failing = True
            else:
                failing = False


def _quantile(ordered: NDArray[np.float64], share: float) -> float:
    """Compute np.quantile, which itself takes ten times as long for the few values of a window."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (position - below) * (ordered[above] - ordered[below]))


def blocked_place(thread: int) -> str:
    """Return what the thread executes: `FUNCTION (FILE:LINE)`."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    return _shown(blocker_name(frame)) if frame else "an unknown place"


def blocked_cause(node: str, blocked_s: object, blocked_at: object) -> str:
    """Return the cause that a run shows. The worker's `Presence` has the last two arguments."""
    for_s = f"{blocked_s:.0f}" if isinstance(blocked_s, int | float) else "some"
    return (
        f"the event loop of worker {_shown(node)} has been blocked for {for_s} s by {_shown(str(blocked_at))}, and its "
        "rollouts count as lost: call what blocks there through `await asyncio.to_thread(...)` or `await graded(...)`, "
        "or use an async library, and restart the worker"
    )


def _shown(text: str) -> str:
    """Cut a text to its end, which names file and line, and replace its control characters."""
    return "".join(char if char.isprintable() else "?" for char in text[-PLACE_CHARACTERS:])
