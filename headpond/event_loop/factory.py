"""The event loop of every asyncio process: uvloop if installed, optionally with the thread pools
of `offload`."""

import asyncio
import logging
from collections.abc import Callable
from functools import cache

from headpond.event_loop import offload

logger = logging.getLogger("headpond.event_loop")


def event_loop_factory(
    *, concurrency: int | None = None, cpu_threads: int | None = None
) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return a factory that `asyncio.Runner(loop_factory=...)` takes. `concurrency` gives the
    loop pools for that many concurrent jobs. The CPU pool has `cpu_threads` threads, by default
    one per core."""

    def new_event_loop() -> asyncio.AbstractEventLoop:
        loop = _fastest_loop()()
        if concurrency is not None:
            offload.install(loop, concurrency=concurrency, cpu_threads=cpu_threads)
        return loop

    return new_event_loop


@cache
def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        logger.warning("action=no_uvloop using=asyncio advice='pip install uvloop: less loop lag'")
        return asyncio.new_event_loop
    return uvloop.new_event_loop
