"""A planted blocker is seen, and named by the line that it blocks in."""

import asyncio
import re
import threading
import time
from collections.abc import Callable

import pytest

from penstock.runtime import loop_lag
from penstock.runtime.loop_lag import LagSummary, LagTrace, LoopLag


def blocked_by(block: Callable[[], object], *, limit_s: float = 0.03) -> tuple[LagSummary, LagTrace]:
    """What a traced loop says of itself after `block` ran on it."""
    trace = LagTrace(limit_s)

    async def main() -> LagSummary:
        lag = LoopLag(process="tests", interval_s=0.01, trace=trace)
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(lag.run())
            await asyncio.sleep(0.05)
            block()
            await asyncio.sleep(0.05)
            summary = lag.summary()
            sampling.cancel()
        return summary

    return asyncio.run(main()), trace


def planted_blocker() -> None:
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass


def catastrophic_pattern() -> object:
    return re.match(r"(a+)+$", "a" * 22 + "b")


def test_code_that_blocks_is_named_with_its_line() -> None:
    summary, _ = blocked_by(planted_blocker)
    (name, seconds), *_ = summary.blockers.items()
    assert re.fullmatch(r"planted_blocker \(runtime/test_lag_trace.py:3\d\)", name)
    assert seconds > 0.1


def test_in_a_library_the_line_that_went_there_is_named() -> None:
    summary, _ = blocked_by(catastrophic_pattern)
    assert any(name.startswith("catastrophic_pattern (runtime/test_lag_trace.py:") for name in summary.blockers)


def test_a_loop_that_is_in_time_has_no_culprits() -> None:
    summary, trace = blocked_by(lambda: None, limit_s=5.0)
    assert summary.blockers == {}
    assert "lag-trace" not in {thread.name for thread in threading.enumerate()}
    assert trace.blockers() == {}


def test_culprits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "NAMES_KEPT", 1)
    trace = LagTrace(0.03)
    for name in ("one", "another", "a third"):
        trace._seen(name, since=0.0, now=1.0, first=False)
    assert trace.blockers() == {"others": 2.0, "one": 1.0}
