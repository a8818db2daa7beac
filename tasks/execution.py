"""Lease -> body -> reply, the same for every job: `AsyncExecutor` on asyncio workers, `SyncExecutor` on prefork.

Whatever the body does, exactly one reply is written before the lease ends. A failure is raised again afterwards, so
that Flower shows it.
"""

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import redis
import redis.asyncio
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from penstock import ids, redis_keys
from penstock.config import RunConfig
from penstock.errors import BlobUnwritten, EngineUnreachable, PolicyFailure
from penstock.messages import GRACE_S, AnyJob, AnyResult, Outcome, Reply, RolloutJob, RolloutResult, shortened
from penstock.runtime.loop_lag import redis_publisher
from tasks.celery_app import settings
from tasks.leases import LeaseKeeper
from tasks.outbox import Expiry, Outbox, Write

logger = logging.getLogger("penstock.execution")

SOCKET_TIMEOUT_S = 5.0  # Redis responds within milliseconds; a longer silence is a dead connection


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One execution of one message. Its id distinguishes two deliveries of the same message."""

    job: AnyJob
    worker: str
    id: str = field(default_factory=ids.new_execution)

    @property
    def lease(self) -> str:
        return str(ids.LeaseId(self.job.run, self.job.job, self.job.attempt, self.id))

    def reply(self, outcome: Outcome, *, result: AnyResult | None = None, error: str | None = None) -> Reply:
        job = self.job
        return Reply(
            run=job.run, job=job.job, attempt=job.attempt, execution=self.id, worker=self.worker,
            outcome=outcome, result=result, error=shortened(error) if error else None,
        )  # fmt: skip

    def failed(self, error: BaseException) -> Reply:
        """A policy's failure is the result of its rollout; any other failure is reported as such and retried."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, asyncio.CancelledError | SystemExit | KeyboardInterrupt):
            return self.reply(Outcome.RELEASED, error=text)
        if isinstance(error, EngineUnreachable):
            return self.reply(Outcome.UNREACHABLE, error=text)
        if isinstance(error, BlobUnwritten):
            return self.reply(Outcome.UNWRITTEN, error=text)
        if isinstance(self.job, RolloutJob) and isinstance(error, PolicyFailure | TimeoutError):
            name = "timeout" if isinstance(error, TimeoutError) else type(error).__name__
            return self.reply(Outcome.DONE, result=RolloutResult(reward=0.0, policy_error=name), error=text)
        return self.reply(Outcome.FAILED, error=text)


def write_lease(pipe: Any, lease: str, value: str) -> Expiry:
    pipe.hset(redis_keys.LEASES, lease, value)
    return redis_keys.LEASES, redis_keys.LEASES_TTL_S


def write_reply(pipe: Any, reply: Reply, lease: str) -> Expiry:
    """Write the reply, then end the lease. A crash between the two leaves a reply and an expiring lease: the reply
    counts."""
    stream = redis_keys.replies(reply.run)
    pipe.xadd(stream, {"reply": reply.model_dump_json()})
    pipe.hdel(redis_keys.LEASES, lease)
    return stream, redis_keys.REPLIES_TTL_S


class AsyncExecutor:
    """Executes the jobs of one asyncio worker, many at a time."""

    def __init__(self, config: RunConfig) -> None:
        self.name = str(ids.WorkerId.of_this_process())
        self._sync_client = redis.Redis.from_url(config.redis_url, socket_timeout=SOCKET_TIMEOUT_S)
        # The client's own time-out swallows cancellations on Python 3.11; callers set one with asyncio.timeout.
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
        """Run the lag sampler and the outbox; if either fails, the worker stops with its error."""
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
        value = self._leases.hold(execution.lease)
        started = time.monotonic()
        failure: BaseException | None = None
        try:
            await self._outbox.write(lambda pipe: write_lease(pipe, execution.lease, value))
            async with asyncio.timeout(job.timeout_s + GRACE_S):
                reply = execution.reply(Outcome.DONE, result=await body(execution.id))
        except BaseException as error:  # noqa: BLE001  any error becomes the reply, and is raised again below
            failure, reply = error, execution.failed(error)
        try:
            reply = _timed(reply, started)
            await self._outbox.write(lambda pipe: write_reply(pipe, reply, execution.lease))
        finally:
            self._leases.drop(execution.lease)
        _raise_unless_done(failure, reply)


class SyncExecutor:
    """Executes the jobs of one prefork child, one at a time."""

    def __init__(self, config: RunConfig) -> None:
        self.name = str(ids.WorkerId.of_this_process())
        forever = Retry(ExponentialBackoff(cap=2.0, base=0.1), retries=-1)  # a reply is retried until it succeeds
        self._client = redis.Redis.from_url(config.redis_url, socket_timeout=SOCKET_TIMEOUT_S, retry=forever)
        lease_client = redis.Redis.from_url(config.redis_url, socket_timeout=SOCKET_TIMEOUT_S)
        self._leases = LeaseKeeper(lease_client, worker=self.name, lease_s=config.recovery.lease_s)
        self._leases.start()

    def execute(self, job: AnyJob, body: Callable[[str], AnyResult]) -> None:
        execution = Execution(job=job, worker=self.name)
        value = self._leases.hold(execution.lease)
        started = time.monotonic()
        failure: BaseException | None = None
        try:
            self._write(lambda pipe: write_lease(pipe, execution.lease, value))
            reply = execution.reply(Outcome.DONE, result=body(execution.id))
        except BaseException as error:  # noqa: BLE001  as above
            failure, reply = error, execution.failed(error)
        try:
            reply = _timed(reply, started)
            self._write(lambda pipe: write_reply(pipe, reply, execution.lease))
        finally:
            self._leases.drop(execution.lease)
        _raise_unless_done(failure, reply)

    def _write(self, write: Write) -> None:
        with self._client.pipeline() as pipe:
            pipe.expire(*write(pipe))
            pipe.execute()


def sync_executor() -> SyncExecutor:
    """The executor of this prefork child, created at its first job: connections do not survive a fork."""
    return _executor_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _executor_of(pid: int) -> SyncExecutor:
    return SyncExecutor(settings())


def _timed(reply: Reply, started: float) -> Reply:
    return reply.model_copy(update={"duration_s": round(time.monotonic() - started, 6)})


def _raise_unless_done(failure: BaseException | None, reply: Reply) -> None:
    """A policy's failure is a result; every other one is raised."""
    if failure is not None and reply.outcome is not Outcome.DONE:
        raise failure
