"""Paces Python's garbage collector: a collection stops all threads, so each one must examine few objects.

By default it runs when there are 700 more objects than before: with 1,000 rollouts, a collection of the youngest
generation took up to 12 ms, one of older generations 3-47 ms. Headpond creates hardly any reference cycles;
environments may.
"""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Generator

# Collecting what 1,000 rollouts allocate in this time takes 0.3 ms.
YOUNG_INTERVAL_S = 0.02
# A full collection, for cycles that outlived the youngest generation, takes 60 ms with 1,000 rollouts.
FULL_INTERVAL_S = 60.0
IDLE_POLL_S = 0.1
YOUNGEST, MIDDLE, ALL_GENERATIONS = 0, 1, 2

# Of `aging_collection`. Collecting what an orchestrator allocates in these times at 800 rollouts a second: 1 and 4 ms.
AGING_YOUNG_S, AGING_S = 0.1, 0.5
# With 160,000 open rollouts a full collection takes 0.2 s: cycles that outlive AGING_S are rare and can wait.
AGING_FULL_S = 3600.0


# Of `seldom_collection`. A chat of the session server leaves 0.015 objects in cycles. With a collection every 700
# objects, collecting took 0.07 ms of CPU a chat.
SELDOM_OBJECTS = 10_000


@contextlib.contextmanager
def seldom_collection() -> Generator[None]:
    """Collect when there are SELDOM_OBJECTS more than before: for a process that makes few cycles, and whose objects
    may be many and idle, so that collections by the clock would examine them in vain. Objects that exist already are
    frozen."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(SELDOM_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextlib.asynccontextmanager
async def paced_collection(is_busy: Callable[[], bool]) -> AsyncIterator[None]:
    """Collect the youngest generation while there is work, and everything when work ends and every minute. Objects that
    exist already are frozen: they are kept and not examined."""
    try:
        async with _collecting(_collect_forever(is_busy)):
            yield
    finally:
        gc.unfreeze()


@contextlib.asynccontextmanager
async def aging_collection() -> AsyncIterator[None]:
    """Freeze whatever outlives AGING_S, so that no collection examines the records of open work: for a process that
    keeps hundreds of thousands of them, without cycles. Frozen objects are freed when nothing refers to them; cycles
    among them, every AGING_FULL_S. They stay frozen at the end, which is that of the process."""
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
