"""Paces Python's garbage collector. A collection stops all threads, so each one must examine few
objects.

Python collects when 700 more objects exist than before. With 1,000 rollouts, a collection of the
youngest generation took up to 12 ms, one of older generations 3-47 ms. Headpond creates hardly
any reference cycles; environments may.
"""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Generator

# Collecting the objects that 1,000 rollouts allocate in this time takes 0.3 ms.
YOUNG_INTERVAL_S = 0.02
# A full collection finds cycles that outlived the youngest generation. It takes 60 ms with 1,000
# rollouts.
FULL_INTERVAL_S = 60.0
IDLE_POLL_S = 0.1
YOUNGEST, MIDDLE, ALL_GENERATIONS = 0, 1, 2

# Python's own rule stopped the loop for 145 ms with 160,000 open rollouts. Of 17,500 rollouts the
# collector found 198 objects in cycles among the youngest and none among the older ones.
# Intervals of `aging_collection`. An orchestrator at 800 rollouts a second then collects for 1 and
# 4 ms.
AGING_YOUNG_S, AGING_S = 0.1, 0.5
# A full collection with 160,000 open rollouts takes 0.2 s. Cycles that outlive AGING_S are rare and
# can wait.
AGING_FULL_S = 3600.0


# Threshold of `seldom_collection`. One chat of the session server leaves 0.015 objects in cycles.
# Collecting every 700 objects took 0.07 ms of CPU a chat.
SELDOM_OBJECTS = 10_000


@contextlib.contextmanager
def seldom_collection() -> Generator[None]:
    """Collect when SELDOM_OBJECTS more objects exist than before, and freeze those that exist
    now. This suits a process with few cycles and many idle objects: collections by the clock
    would examine them in vain."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(SELDOM_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextlib.asynccontextmanager
async def paced_collection(is_busy: Callable[[], bool]) -> AsyncIterator[None]:
    """Collect the youngest generation during work, and everything when work ends and every
    minute. Existing objects are frozen: collections no longer examine them."""
    try:
        async with _collecting(_collect_forever(is_busy)):
            yield
    finally:
        gc.unfreeze()


@contextlib.asynccontextmanager
async def aging_collection() -> AsyncIterator[None]:
    """Freeze objects that outlive AGING_S, so that no collection examines the records of open
    work. This suits a process with hundreds of thousands of them and no cycles. Frozen objects
    are freed with their last reference, cycles among them every AGING_FULL_S. They stay frozen
    at the end: the process ends too."""
    async with _collecting(_age_forever()):
        yield


@contextlib.asynccontextmanager
async def _collecting(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    collecting = asyncio.create_task(work)
    try:
        yield
    finally:
        collecting.cancel()
        gc.enable()


async def _age_forever() -> None:
    loop = asyncio.get_running_loop()
    age_at, full_at = loop.time() + AGING_S, loop.time() + AGING_FULL_S
    while True:
        await asyncio.sleep(AGING_YOUNG_S)
        if loop.time() < age_at:
            gc.collect(YOUNGEST)
            continue
        age_at = loop.time() + AGING_S
        if loop.time() >= full_at:
            full_at = loop.time() + AGING_FULL_S
            gc.unfreeze()
            gc.collect(ALL_GENERATIONS)
        else:
            gc.collect(MIDDLE)
        gc.freeze()


async def _collect_forever(is_busy: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        full_at = loop.time() + FULL_INTERVAL_S
        while not is_busy() and loop.time() < full_at:
            await asyncio.sleep(IDLE_POLL_S)
        while is_busy() and loop.time() < full_at:
            await asyncio.sleep(YOUNG_INTERVAL_S)
            gc.collect(YOUNGEST)
        gc.collect(ALL_GENERATIONS)
