"""The rollout worker: `celery -A workers.rollouts worker -Q rollouts -c 256`. One event loop, many rollouts."""

import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Any

from penstock import descriptors
from tasks import app, rollouts
from tasks.execution import AsyncProcess
from tasks.playing import Player
from tasks.settings import settings
from workers import event_batches
from workers.asyncio_pool import AsyncioPool
from workers.start import announce

# A turn leaves no reference cycles (counted: none in 160 turns), but a full collection looks at every live rollout, for
# 60 ms with 400 of them. Environments may leave some: they are found ten times as late as by default.
COLLECTIONS = (700, 10, 100)


class RolloutPool(AsyncioPool):
    """Opens what the executions share before the first job, and closes it after the last."""

    def on_start(self) -> None:
        self.drain_s = settings().recovery.drain_s
        descriptors.ensure(self.limit)
        super().on_start()

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        config = settings()
        process = AsyncProcess(config)
        async with process.running(), Player(config).ready() as player:
            rollouts.process, rollouts.player = process, player
            # What the imports made stays: every full collection looked through it, for 55 ms in which no thread runs.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*COLLECTIONS)
            yield

    def loop_lag(self) -> dict[str, Any] | None:
        return rollouts.process.lag.summary().as_dict() if rollouts.process else None


announce(app)
event_batches.install(app)
app.conf.worker_pool = f"{__name__}:{RolloutPool.__name__}"
