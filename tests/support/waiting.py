"""Wait for a condition with a deadline, instead of sleeping for a fixed time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

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


def _timed_out(predicate: Callable[[], object], value: object, timeout_s: float, what: str) -> str:
    name = what or getattr(predicate, "__qualname__", repr(predicate))
    return f"waited {timeout_s:g} s for: {name}; last value: {value!r}"
