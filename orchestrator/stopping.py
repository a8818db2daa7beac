"""Ctrl-C once: finish what runs, begin nothing. Twice: stop now. Either way the run can be resumed."""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from enum import StrEnum

logger = logging.getLogger("penstock.orchestrator")


class Phase(StrEnum):
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"


class Stopping:
    def __init__(self) -> None:
        self.phase = Phase.RUNNING
        self._stopped = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self.ask)

    def ask(self) -> None:
        if self.phase is Phase.RUNNING:
            self.phase = Phase.DRAINING
            logger.warning("action=draining what runs is finished, nothing is begun; Ctrl-C again stops now")
        else:
            self.phase = Phase.STOPPING
            logger.warning("action=stopping")
            self._stopped.set()

    async def unless_stopped(self, work: Coroutine[None, None, None]) -> None:
        """Do `work`, whatever it waits for, until it is done or the second request to stop comes."""
        doing, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({doing, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            if not doing.done():
                doing.cancel()
        if doing.done() and not doing.cancelled():
            doing.result()
