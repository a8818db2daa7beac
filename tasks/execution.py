"""Lease -> body -> reply, the same for every job: `AsyncProcess` on asyncio workers, `SyncProcess` in prefork children.

Whatever the body does, exactly one reply is written before the lease ends; a failure is raised again afterwards, so
that Flower shows it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import redis
import redis.asyncio
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from penstock.config import RunConfig
from penstock.ids import WorkerId
from penstock.messages import GRACE_S, AnyJob, AnyResult, Outcome, Reply
from penstock.runtime.loop_lag import redis_publisher
from tasks.leases import LeaseKeeper
from tasks.outbox import Outbox, Write
from tasks.outcomes import Execution, send, take_lease

logger = logging.getLogger("penstock.execution")

SOCKET_TIMEOUT_S = 5.0  # Redis answers within milliseconds; a longer silence is a dead connection


class AsyncProcess:
    """What the executions of one asyncio worker share."""

    def __init__(self, config: RunConfig) -> None:
        self.name = str(WorkerId.of_this_process())
        self._sync_client = redis.Redis.from_url(config.redis_url, socket_timeout=SOCKET_TIMEOUT_S)
        # No time-out of the client's own: on Python 3.11 it swallows cancellations. Those who use it bring one.
        self._client = redis.asyncio.Redis.from_url(config.redis_url, socket_timeout=None)
        self.lag = config.lag.watch(f"rollouts@{self.name}", redis_publisher(self._client))
        self._silence_s = config.recovery.lease_s / 2
        self._outbox = Outbox(self._client)
        self._leases = LeaseKeeper(
            self._sync_client, worker=self.name, lease_s=config.recovery.lease_s, alive=self._ticks
        )

    def _ticks(self) -> bool:
        return time.monotonic() - self.lag.last_tick < self._silence_s

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Should the sampler or the outbox fail, the worker stops with their error."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.lag.run()), group.create_task(self._outbox.run())]
                await asyncio.sleep(0)
                self._leases.start()
                yield
                for task in tasks:
                    task.cancel()
        finally:
            self._leases.stop()
            await self._client.aclose()
            self._sync_client.close()

    async def execute(self, job: AnyJob, body: Callable[[str], Awaitable[AnyResult]]) -> None:
        execution = Execution(job=job, worker=self.name)
        value = self._leases.take(execution.lease)
        started = time.monotonic()
        failure: BaseException | None = None
        try:
            await self._outbox.write(lambda pipe: take_lease(pipe, execution.lease, value))
            async with asyncio.timeout(job.timeout_s + GRACE_S):
                reply = execution.reply(Outcome.DONE, result=await body(execution.id))
        except BaseException as error:  # noqa: BLE001  whatever a body does becomes its reply, then goes on its way
            failure, reply = error, execution.failed(error)
        try:
            reply = _timed(reply, started)
            await self._outbox.write(lambda pipe: send(pipe, reply, execution.lease))
        finally:
            self._leases.drop(execution.lease)
        _raise_unless_done(failure, reply)


class SyncProcess:
    """What the executions of one prefork child share: it runs one at a time."""

    def __init__(self, config: RunConfig) -> None:
        self.name = str(WorkerId.of_this_process())
        backoff = Retry(ExponentialBackoff(cap=2.0, base=0.1), retries=-1)  # a reply is tried until it succeeds
        self._client = redis.Redis.from_url(config.redis_url, socket_timeout=SOCKET_TIMEOUT_S, retry=backoff)
        own_client = redis.Redis.from_url(config.redis_url, socket_timeout=SOCKET_TIMEOUT_S)
        self._leases = LeaseKeeper(own_client, worker=self.name, lease_s=config.recovery.lease_s)
        self._leases.start()

    def execute(self, job: AnyJob, body: Callable[[str], AnyResult]) -> None:
        execution = Execution(job=job, worker=self.name)
        value = self._leases.take(execution.lease)
        started = time.monotonic()
        failure: BaseException | None = None
        try:
            self._write(lambda pipe: take_lease(pipe, execution.lease, value))
            reply = execution.reply(Outcome.DONE, result=body(execution.id))
        except BaseException as error:  # noqa: BLE001  as above
            failure, reply = error, execution.failed(error)
        try:
            reply = _timed(reply, started)
            self._write(lambda pipe: send(pipe, reply, execution.lease))
        finally:
            self._leases.drop(execution.lease)
        _raise_unless_done(failure, reply)

    def _write(self, write: Write) -> None:
        with self._client.pipeline() as pipe:
            pipe.expire(*write(pipe))
            pipe.execute()


def _timed(reply: Reply, started: float) -> Reply:
    return reply.model_copy(update={"duration_s": round(time.monotonic() - started, 6)})


def _raise_unless_done(failure: BaseException | None, reply: Reply) -> None:
    """What the policy did wrong is a result like any other; everything else shows as a failure."""
    if failure is not None and reply.outcome is not Outcome.DONE:
        raise failure
