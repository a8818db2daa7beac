"""The event loop of every asyncio process: uvloop where it is installed, with the pools of `offload` where asked."""

import asyncio
import logging
from collections.abc import Callable
from functools import cache

from penstock.runtime import offload

logger = logging.getLogger("penstock.event_loop")


def event_loop_factory(
    *, concurrency: int | None = None, cpu_threads: int | None = None
) -> Callable[[], asyncio.AbstractEventLoop]:
    """For `asyncio.Runner(loop_factory=...)`; with `concurrency`, the loop gets pools for that many jobs at once, the
    one for CPU work as wide as `cpu_threads` or as the cores."""

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
        logger.warning("action=no_uvloop using=asyncio advice='pip install uvloop: loops run with less lag'")
        return asyncio.new_event_loop
    return uvloop.new_event_loop
