"""How late the loops of the run's other processes run, from what they publish in Redis."""

import asyncio

from orchestrator.broker import Broker
from penstock.runtime.loop_lag import LagSummary, read_summaries_async

EVERY_S = 2.0
OWN = "orchestrator"


class Lags:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.others: list[LagSummary] = []
        """the last window of every process but this one"""

    async def run(self) -> None:
        while True:
            found = await self._broker.ask(read_summaries_async)
            self.others = [lag for lag in found if lag.process != OWN]
            await asyncio.sleep(EVERY_S)
