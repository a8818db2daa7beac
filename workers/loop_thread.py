"""An event loop in its own thread, with a lifespan around everything that runs on it.

Owns the thread and the order of start and stop. Invariant: one task enters and leaves the lifespan, so that it may hold
a TaskGroup or a time-out.
"""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

logger = logging.getLogger("headpond.workers.loop_thread")


class LoopThread:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, lifespan: Callable[[], AbstractAsyncContextManager[object]]
    ) -> None:
        self.loop = loop
        self._lifespan = lifespan
        self._leave = asyncio.Event()
        self._closing = False
        self._entered = threading.Event()
        # A daemon: a body that never ends must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="asyncio-pool", daemon=True)
        self.ended: concurrent.futures.Future[None]

    def start(self) -> None:
        """Start the thread and enter the lifespan. `ended` is done when it was left, or could not be entered."""
        self._thread.start()
        self.ended = asyncio.run_coroutine_threadsafe(self._live(), self.loop)
        self.ended.add_done_callback(lambda _: self._entered.set())

    def wait_entered(self, timeout_s: float) -> bool:
        """Whether the lifespan was entered in time. Raises the error that prevented it."""
        if not self._entered.wait(timeout_s):
            return False
        if self.ended.done():
            self.ended.result()
        return True

    def stop(self, timeout_s: float) -> None:
        """Leave the lifespan, then end the thread. Tasks that still run on the loop are abandoned."""
        self.loop.call_soon_threadsafe(self._leave.set)
        done, _ = concurrent.futures.wait([self.ended], timeout=timeout_s)
        if not done:
            logger.warning("action=lifespan_abandoned: it did not end within %g s", timeout_s)
        elif error := self.ended.exception():
            logger.error("action=lifespan_failed: %r", error, exc_info=error)
        self._closing = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)

    async def _live(self) -> None:
        async with self._lifespan():
            self._entered.set()
            await self._leave.wait()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._closing:
            # asyncio and uvloop re-raise these from a task and continue when run again, so that user code which calls
            # sys.exit() fails its own task only.
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
        self.loop.close()
