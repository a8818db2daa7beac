"""Long work on the loop in short steps: whoever waits for the loop has its turn between two of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")
AT_ONCE = 8  # replies to apply or jobs to encode: about 1 ms


async def spaced(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """`items` in slices. Everything may have changed when the next one comes."""
    for first in range(0, len(items), AT_ONCE):
        await asyncio.sleep(0)
        yield items[first : first + AT_ONCE]
