"""Python's garbage collector beside a loop: while it looks at objects, no thread runs, so it looks at few at a time.

Left to itself it comes when there are 700 more objects than before, however many were made and freed since: with 1,000
rollouts it took up to 12 ms for the youngest and 3 to 47 for those that outlived a few rounds. Yet there is little to
find: Penstock leaves hardly any cycles of references. Environments may.
"""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable

YOUNG_S = 0.02  # what 1,000 rollouts make in this time is looked at in 0.3 ms
# Cycles that were not young any more when they were left. Looking at everything takes 60 ms with 1,000 rollouts.
ALL_S = 60.0
LOOK_S = 0.1
YOUNG, ALL = 0, 2


@contextlib.asynccontextmanager
async def paced_collection(is_busy: Callable[[], bool]) -> AsyncIterator[None]:
    """The young while there is work; everything when it ends, and every minute. What was made before stays, and is not
    looked at."""
    gc.collect()
    gc.freeze()
    gc.disable()
    collecting = asyncio.create_task(_collect_for_ever(is_busy))
    try:
        yield
    finally:
        collecting.cancel()
        gc.enable()
        gc.unfreeze()


async def _collect_for_ever(is_busy: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        all_at = loop.time() + ALL_S
        while not is_busy() and loop.time() < all_at:
            await asyncio.sleep(LOOK_S)
        while is_busy() and loop.time() < all_at:
            await asyncio.sleep(YOUNG_S)
            gc.collect(YOUNG)
        gc.collect(ALL)
