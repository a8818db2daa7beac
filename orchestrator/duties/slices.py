"""Splits long work on the event loop into short slices, between which other tasks run."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")
AT_ONCE = 8  # replies to apply or jobs to encode: about 1 ms


async def in_slices(items: Sequence[T], at_once: int = AT_ONCE) -> AsyncIterator[Sequence[T]]:
    """`items` in slices. Other tasks run between two slices and may change any state."""
    for first in range(0, len(items), at_once):
        await asyncio.sleep(0)
        yield items[first : first + at_once]
