"""The event loop of every asyncio process: uvloop if installed, optionally with the thread pools
of `offload`."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

from headpond.event_loop import offload

T = TypeVar("T")

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


def run(work: Coroutine[Any, Any, T], *, concurrency: int | None = None, cpu_threads: int | None = None) -> T:
    """Run a coroutine to its end, on a loop of its own."""
    factory = event_loop_factory(concurrency=concurrency, cpu_threads=cpu_threads)
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def stop_requested() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set from now on."""
    stopping = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    return stopping


@cache
def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        logger.warning("action=no_uvloop using=asyncio advice='pip install uvloop: less loop lag'")
        return asyncio.new_event_loop
    return uvloop.new_event_loop
