"""The rollout worker: `celery -A headpond.workers.rollouts worker -Q rollouts -c 256`. One loop, many rollouts."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from headpond.broker.queues import WorkerKind
from headpond.event_loop import garbage
from headpond.processes import descriptors
from headpond.tasks import app, jobs
from headpond.tasks.celery_app import settings
from headpond.tasks.execution import AsyncExecutor
from headpond.tasks.player import Player
from headpond.workers.asyncio_pool import AsyncioPool
from headpond.workers.start import set_up


class RolloutPool(AsyncioPool):
    """Opens executor and player before the first job, and closes them after the last."""

    def on_start(self) -> None:
        self.drain_s = settings().recovery.drain_s
        descriptors.raise_limit(self.limit)
        super().on_start()

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        config = settings()
        executor = AsyncExecutor(config)
        async with executor.running(), Player(config).ready() as player:
            jobs.executor, jobs.player = executor, player
            async with garbage.paced_collection(lambda: bool(self._bodies)):
                yield

    def loop_lag(self) -> dict[str, Any] | None:
        return jobs.executor.lag.summary().as_dict() if jobs.executor else None


set_up(app, WorkerKind.ROLLOUTS, pool=f"{__name__}:{RolloutPool.__name__}")
