"""How a run ends: a drain leaves everything to be resumed, a finish cleans up Redis and the job inputs."""

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from headpond.broker import redis_keys
from headpond.broker.queues import Queue
from headpond.config import RunConfig
from headpond.event_loop.offload import in_io_thread
from headpond.ids import LeaseId
from headpond.ledger.states import GroupState, JobState
from headpond.orchestrator.duties.housekeeping import Reported, delete
from headpond.orchestrator.duties.slices import in_slices
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.exchange.reply_stream import ReplyStream
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.submission import MESSAGES_AT_ONCE
from headpond.orchestrator.workforce.leases import LEASES_AT_ONCE, read_leases, remove_leases
from headpond.store import open_store
from headpond.tasks import app, envelope, inputs
from headpond.tasks.celery_app import broker_settings

logger = logging.getLogger("headpond.orchestrator")

TICK_S = 0.1
CANCELLED_AT_ONCE = 16  # groups with their jobs: about 1 ms
REVOKE_S = 5.0  # publishing one message takes milliseconds
ONE_TRY = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}


class Phase(StrEnum):
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"


class StopRequests:
    """SIGINT and SIGTERM: the first one drains, the second one stops at once."""

    def __init__(self) -> None:
        self.phase = Phase.RUNNING
        self._stopped = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self.request)

    def request(self) -> None:
        if self.phase is Phase.RUNNING:
            self.phase = Phase.DRAINING
            logger.warning("action=draining running jobs are finished, none is started; press Ctrl-C again to stop now")
        else:
            self.phase = Phase.STOPPING
            logger.warning("action=stopping")
            self._stopped.set()

    async def run_unless_stopped(self, work: Coroutine[None, None, None]) -> None:
        """Await `work`, and cancel it at the second request to stop."""
        doing, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({doing, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            if not doing.done():
                doing.cancel()
        if doing.done() and not doing.cancelled():
            doing.result()


class Shutdown:
    def __init__(self, config: RunConfig, run: str, ledger: Ledger, broker: Broker, replies: ReplyStream) -> None:
        self._config = config
        self._run = run
        self._ledger = ledger
        self._broker = broker
        self._replies = replies
        self._revoking: asyncio.Task[None] | None = None

    async def drain(self) -> None:
        """Withdraw the queued jobs, then wait up to `drain_s` for the running ones."""
        try:
            async with asyncio.timeout(self._config.recovery.drain_s):
                await self._withdraw()
                while self._submitted():
                    await asyncio.sleep(TICK_S)
        except TimeoutError:
            logger.warning(
                "action=drain_timeout running=%d their replies are read when the run is resumed", self._submitted()
            )

    async def finish(self) -> None:
        """After the last step: cancel open work, end running executions, remove leases, replies and job inputs."""
        await self._cancel_open_work()
        await self._ledger.committed()
        await self._withdraw()
        running = await self._leases()
        await self._broker.call(lambda client: client.set(redis_keys.ENDED, self._run, ex=redis_keys.ENDED_TTL_S))
        if running:
            await self.revoke([str(lease.task) for lease in running])
        give_up_at = time.monotonic() + self._config.recovery.lease_s
        while await self._leases() and time.monotonic() < give_up_at:
            await asyncio.sleep(TICK_S)
        # Of every run, as the messages: a live worker writes its lease again within a second, and removes it itself.
        await remove_leases(self._broker, list(await read_leases(self._broker)))
        await self._replies.delete()
        store = open_store(self._config.store_url)
        with Reported("list the job inputs"):
            await in_io_thread(delete, store, await in_io_thread(inputs.keys, store, self._run))

    async def resume(self) -> None:
        """A run that has ended continues with more steps."""
        await self._broker.call(lambda client: client.delete(redis_keys.ENDED))

    async def revoke(self, task_ids: list[str]) -> None:
        """Only saves work, so it neither fails nor waits: the ledger has already settled these jobs."""
        if self._revoking is not None and not self._revoking.done():
            logger.warning("action=not_revoked tasks=%d: the call before has not returned", len(task_ids))
            return
        app.conf.update(broker_settings(self._config.redis_url))
        self._revoking = asyncio.create_task(in_io_thread(_revoke, task_ids))
        if not (await asyncio.wait([self._revoking], timeout=REVOKE_S))[0]:
            logger.warning("action=not_revoked tasks=%d: Redis has not answered in %g s", len(task_ids), REVOKE_S)

    async def _cancel_open_work(self) -> None:
        """A group at a time with all its jobs: replies are applied between the slices, and may add a job to a group."""
        async for some in in_slices(list(self._ledger.groups.values()), CANCELLED_AT_ONCE):
            for group in some:
                if group.state != GroupState.CLOSED:
                    self._ledger.cancel(group, "run_ended")
            self._ledger.commit_soon()
        for job in list(self._ledger.jobs.values()):  # surveys
            self._ledger.end(job, JobState.CANCELLED)

    def _submitted(self) -> int:
        return sum(number for (_, state), number in self._ledger.job_counts.items() if state is JobState.SUBMITTED)

    async def _withdraw(self) -> None:
        """Empty the queues; their jobs wait again, with no failure or loss counted."""
        for queue in Queue:
            while messages := await self._broker.call(lambda client, queue=queue: _take(client, queue)):
                for task in filter(None, map(envelope.task_of, messages)):
                    job = self._ledger.jobs.get(task.job) if task.run == self._run else None
                    if job is not None and job.state is JobState.SUBMITTED:
                        self._ledger.retry(job)
                self._ledger.commit_soon()

    async def _leases(self) -> list[LeaseId]:
        """The leases of this run's executions."""
        leases: list[LeaseId] = []
        async for some in in_slices(list(await read_leases(self._broker)), LEASES_AT_ONCE):
            leases += [lease for lease in map(LeaseId.match, some) if lease and lease.run == self._run]
        return leases


def _revoke(task_ids: list[str]) -> None:
    options = {**app.conf.broker_transport_options, **ONE_TRY}
    try:
        with app.connection_for_write(transport_options=options) as connection:
            app.control.revoke(task_ids, terminate=True, connection=connection)
    except (OperationalError, RedisError, OSError) as error:
        logger.warning("action=not_revoked tasks=%d error=%s", len(task_ids), error)


async def _take(client: Any, queue: Queue) -> list[bytes]:
    """The next messages, which are removed. None when the queue is empty."""
    async with client.pipeline(transaction=True) as pipe:
        pipe.lrange(queue, 0, MESSAGES_AT_ONCE - 1)
        pipe.ltrim(queue, MESSAGES_AT_ONCE, -1)
        messages, _ = await pipe.execute()
    return messages
