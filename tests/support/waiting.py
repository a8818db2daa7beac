"""Wait for a condition with a deadline, instead of sleeping for a fixed time; a clock that only `advance` moves."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

POLL_S = 0.015
HANG_S = 120.0
"""Longer than anything takes on a machine that is busy with other work: what is not done by then hangs."""


def wait_until(predicate: Callable[[], T], *, timeout_s: float = HANG_S, what: str = "") -> T:
    """The first true value of `predicate`."""
    deadline = time.monotonic() + timeout_s
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(_timed_out(predicate, value, timeout_s, what))
        time.sleep(POLL_S)
    return value


async def wait_until_async(
    predicate: Callable[[], T] | Callable[[], Awaitable[T]], *, timeout_s: float = HANG_S, what: str = ""
) -> T:
    """The same on a running loop; `predicate` may be a coroutine function."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(_timed_out(predicate, value, timeout_s, what))
        await asyncio.sleep(POLL_S)


async def unless_failed(work: Awaitable[T], others: Sequence["asyncio.Task[Any]"]) -> T:
    """The result of `work`, or the first exception of the tasks that run meanwhile: it waits for nothing that a failed
    task would have done. If `work` fails, its error names the tasks that had ended."""
    working = asyncio.ensure_future(work)
    try:
        running: set[asyncio.Future[Any]] = {working, *others}
        while not working.done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {working}:
                task.result()
        return await working
    except Exception as error:
        for task in others:
            if task.done() and not task.cancelled() and not task.exception():
                error.add_note(f"ended before: {task.result()!r}")
        raise
    finally:
        working.cancel()


def _timed_out(predicate: Callable[[], object], value: object, timeout_s: float, what: str) -> str:
    name = what or getattr(predicate, "__qualname__", repr(predicate))
    return f"waited {timeout_s:g} s for: {name}; last value: {value!r}"


class Clock:
    def __init__(self) -> None:
        self.now = float(int(time.monotonic()))  # whole seconds add up without rounding

    def advance(self, seconds: float) -> None:
        self.now += seconds
