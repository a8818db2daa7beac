"""How a run comes to rest: a drain leaves everything to be resumed, a finish leaves nothing behind."""

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from orchestrator.broker import Broker
from orchestrator.ledger.ledger import Ledger
from orchestrator.reply_stream import ReplyStream
from penstock import job_inputs, redis_keys
from penstock.config import RunConfig
from penstock.ids import LeaseId, TaskId
from penstock.ledger.states import IN_FLIGHT, GroupState, JobState
from penstock.messages import Queue
from penstock.runtime.offload import in_io_thread
from tasks import app

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


TICK_S = 0.1


class Ending:
    def __init__(self, config: RunConfig, run: str, ledger: Ledger, broker: Broker, replies: ReplyStream) -> None:
        self._config = config
        self._run = run
        self._ledger = ledger
        self._broker = broker
        self._replies = replies

    async def drain(self) -> None:
        """Take back what no worker has begun, and wait for what one has, within `drain_s`."""
        try:
            async with asyncio.timeout(self._config.recovery.drain_s):
                await self._withdraw()
                while self._submitted():
                    await asyncio.sleep(TICK_S)
        except TimeoutError:
            logger.warning("action=drain_timeout running=%d replies wait for the resumed run", self._submitted())

    async def finish(self) -> None:
        """The last step is delivered: what is still open is of no use to anybody."""
        self._close_everything()
        await self._ledger.committed()
        await self._withdraw()
        running = await self._leases()
        if running:
            await self.revoke([str(id.task) for id in map(LeaseId.match, running) if id])
        give_up_at = time.monotonic() + self._config.recovery.lease_s
        while await self._leases() and time.monotonic() < give_up_at:
            await asyncio.sleep(TICK_S)
        leases = await self._leases()
        if leases:
            await self._broker.ask(lambda client: client.hdel(redis_keys.LEASES, *leases))
        await self._replies.delete()
        await in_io_thread(_delete_plans, self._config.store_dir, self._run)

    async def revoke(self, task_ids: list[str]) -> None:
        """Saves work, and is never needed: the ledger has settled the jobs before."""
        app.conf.update(broker_url=self._config.redis_url)
        await in_io_thread(app.control.revoke, task_ids, terminate=True)

    def _close_everything(self) -> None:
        for job in list(self._ledger.jobs.values()):
            self._ledger.end(job, JobState.CANCELLED)
        for group in list(self._ledger.groups.values()):
            for rollout in group.of(*IN_FLIGHT):
                self._ledger.drop(rollout, "run_ended")
            self._ledger.enter(group, GroupState.CLOSED)

    def _submitted(self) -> int:
        return sum(job.state is JobState.SUBMITTED for job in self._ledger.jobs.values())

    async def _withdraw(self) -> None:
        """Empty the queues; what was in them waits again, and counts as nothing."""
        for queue in Queue:
            for message in await self._broker.ask(lambda client, queue=queue: _emptied(client, queue)):
                job = self._ledger.jobs.get(_job_of(message))
                if job is not None and job.state is JobState.SUBMITTED:
                    self._ledger.wait(job)

    async def _leases(self) -> list[str]:
        """The leases of this run's executions."""
        leases: Any = await self._broker.ask(lambda client: client.hkeys(redis_keys.LEASES))
        return [lease.decode() for lease in leases if lease.startswith(self._run.encode())]


def _delete_plans(store: Path, run: str) -> None:
    for key in job_inputs.keys(store, run):
        job_inputs.delete(store, key)


async def _emptied(client: Any, queue: Queue) -> list[bytes]:
    async with client.pipeline(transaction=True) as pipe:
        pipe.lrange(queue, 0, -1)
        pipe.delete(queue)
        messages, _ = await pipe.execute()
    return messages


def _job_of(message: bytes) -> str:
    task_id = str(orjson.loads(message).get("headers", {}).get("id", ""))
    id = TaskId.match(task_id)
    return id.job if id else ""
