"""Work on the event loop: long work in short slices, between which other tasks run; work that is repeated."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
AT_ONCE = 8  # replies to apply or jobs to encode: about 1 ms


async def in_slices(items: Sequence[T], at_once: int = AT_ONCE) -> AsyncIterator[Sequence[T]]:
    """`items` in slices. Other tasks run between two slices and may change any state."""
    for first in range(0, len(items), at_once):
        await asyncio.sleep(0)
        yield items[first : first + at_once]


async def repeat(work: Callable[[], Awaitable[object]], every_s: float) -> None:
    """Do `work`, pause, and so on until cancelled."""
    while True:
        await work()
        await asyncio.sleep(every_s)
