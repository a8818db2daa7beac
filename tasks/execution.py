"""Lease -> body -> reply, the same for every job: `AsyncExecutor` on asyncio workers, which write to Redis through one
`Outbox`; `SyncExecutor` on prefork.

Whatever the body does, exactly one reply is written before the lease ends. A body that raises has failed, also with
SystemExit or a cancellation of its own; only a worker that stops releases its jobs. A failure is raised again
afterwards, so that Flower shows it.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import redis
import redis.asyncio
from celery.exceptions import Terminated
from redis.exceptions import RedisError

from headpond import ids
from headpond.broker import redis_keys
from headpond.broker.queues import WorkerKind
from headpond.config import RunConfig
from headpond.errors import BlobUnwritten, EngineUnreachable, HeadpondError, StageError, shortened, text_of
from headpond.event_loop.lag_summaries import redis_publisher
from headpond.event_loop.loop_lag import blocked_place
from headpond.records.rollout import RolloutResult
from headpond.records.wire import Result
from headpond.replica_use import ASKED, ReplicaUse
from headpond.tasks.agreement import Identity, identity, message_headers
from headpond.tasks.celery_app import settings
from headpond.tasks.leases import LeaseKeeper
from headpond.tasks.stage import GRACE_S, REPLY_LIMIT_BYTES, Call, Message, Outcome, Reply, Stage

if TYPE_CHECKING:  # only rollout workers load environments and the engine's client
    from headpond.tasks.player import Player

logger = logging.getLogger("headpond.execution")

Expiry = tuple[str, int]  # A written key and its time to live in seconds.
Write = Callable[[Any], Expiry]  # Adds its commands to a pipeline.
TIMEOUT_S = 5.0  # Redis responds within milliseconds; a longer silence is a dead connection
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0
PIPELINE_WRITES = 48  # keeps the CPU time of one round trip on the loop under a millisecond
GATHER_S = 0.01  # between two pipelines: a single write is sent at once, many concurrent ones share pipelines


class WorkerStopping(SystemExit):
    """Raised in a prefork child by the signal of a cold stop."""


class EncodedReply(NamedTuple):
    content: bytes
    failure: BaseException | None  # raised again after the reply is written


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One execution of one message. Its id distinguishes two deliveries of the same message."""

    stage: Stage[Any, Any]
    job: Message
    worker: str
    identity: Identity
    id: str = field(default_factory=ids.new_execution)
    started: float = field(default_factory=time.monotonic)

    @property
    def lease(self) -> str:
        return str(ids.LeaseId(self.job.run, self.job.job, self.job.attempt, self.id))

    def call(self, config: RunConfig, player: "Player | None" = None) -> Call[Any]:
        return Call(message=self.job, execution=self.id, config=config, opened=player)

    def done(self, result: Any) -> EncodedReply:
        """The encoded result. If the orchestrator could not read it, an encoded failure that says why."""
        try:
            uses = result.replica_uses if isinstance(result, RolloutResult) else None
            content = self._reply(Outcome.DONE, result=result, replica_uses=uses).model_dump_json().encode()
            Reply.model_validate_json(content)  # NaN is encoded as null
        except Exception as error:  # noqa: BLE001  any error: there must be a reply
            what = f"the result of {self.job.job} cannot be encoded: {text_of(error)}"
            return self.failed(StageError(what))
        if len(content) > REPLY_LIMIT_BYTES:
            what = f"the result of {self.job.job} takes {len(content)} bytes; the limit is {REPLY_LIMIT_BYTES}"
            return self.failed(StageError(what))
        return EncodedReply(content, None)

    def failed(self, error: BaseException, *, released: bool = False) -> EncodedReply:
        """An encoded failure. `released`: the worker stops, and the job is not to blame."""
        if released:
            outcome = Outcome.RELEASED
        elif isinstance(error, EngineUnreachable):
            outcome = Outcome.UNREACHABLE
        elif isinstance(error, BlobUnwritten):
            outcome = Outcome.UNWRITTEN
        else:
            outcome = Outcome.FAILED
        uses = error.replica_uses if isinstance(error, HeadpondError) else None
        reply = self._reply(outcome, error=text_of(error), replica_uses=uses)
        return EncodedReply(reply.model_dump_json().encode(), error)

    def declined(self) -> EncodedReply | None:
        """The reply to a message that this worker must not execute, without its lease and body."""
        why = self.identity.declines(message_headers())
        if why is None:
            return None
        logger.info("action=declined job=%s attempt=%d %s", self.job.job, self.job.attempt, why)
        return EncodedReply(self._reply(Outcome.DECLINED, error=why).model_dump_json().encode(), None)

    def timed_out(self) -> BlobUnwritten | TimeoutError:
        """Return the error of a body that exceeded its time. Play ends itself at its time-out: only the store can delay
        it further."""
        if self.stage.ends_itself:
            return BlobUnwritten(
                f"the rollout was not stored within {GRACE_S:g} s after its time-out ({self.job.timeout_s:g} s): "
                "check the speed of the store"
            )
        return TimeoutError(f"took longer than {self.job.timeout_s + GRACE_S:g} s")

    def _reply(
        self,
        outcome: Outcome,
        *,
        result: Result | None = None,
        error: str | None = None,
        replica_uses: Mapping[str, ReplicaUse] | None = None,
    ) -> Reply:
        job = self.job
        return Reply(
            stage=self.stage.name, run=job.run, job=job.job, attempt=job.attempt, execution=self.id, worker=self.worker,
            node=self.identity.node, settings=self.identity.settings, outcome=outcome, result=result,
            error=shortened(error) if error else None, replica_uses=dict(replica_uses or {}),
            duration_s=round(time.monotonic() - self.started, 6),
        )  # fmt: skip


def write_lease(pipe: Any, lease: str, value: str) -> Expiry:
    pipe.hset(redis_keys.LEASES, lease, value)
    return redis_keys.LEASES, redis_keys.LEASES_TTL_S


def write_reply(pipe: Any, execution: Execution, content: bytes) -> Expiry:
    """Write the reply, then end the lease. A crash between the two leaves a reply and an expiring lease: the reply
    counts."""
    stream = redis_keys.replies(execution.job.run)
    pipe.xadd(stream, {"reply": content})
    pipe.hdel(redis_keys.LEASES, execution.lease)
    return stream, redis_keys.REPLIES_TTL_S


class Outbox:
    """Writes to Redis for many executions of an asyncio worker, over one connection.

    A write is repeated until it succeeds: leases and replies are safe to repeat. The number of waiting writes is
    bounded by the executions that wait for them, at most `-c`.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._waiting: list[tuple[Write, asyncio.Future[None]]] = []
        self._filled = asyncio.Event()

    async def write(self, write: Write) -> None:
        """Put `write` into the next pipeline and wait until Redis has executed it."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((write, written))
        self._filled.set()
        await written

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            batch, self._waiting = self._waiting[:PIPELINE_WRITES], self._waiting[PIPELINE_WRITES:]
            if not self._waiting:
                self._filled.clear()
            await self._send(batch)
            await asyncio.sleep(GATHER_S)

    async def _send(self, batch: list[tuple[Write, asyncio.Future[None]]]) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            try:
                async with asyncio.timeout(TIMEOUT_S), self._client.pipeline(transaction=True) as pipe:
                    expiries = {write(pipe) for write, _ in batch}
                    for key, ttl_s in expiries:
                        pipe.expire(key, ttl_s)
                    await pipe.execute()
                break
            except (RedisError, OSError) as error:
                logger.warning(
                    "action=redis_write_waits writes=%d again_in_s=%.1f error=%s", len(batch), pause_s, error
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)
        for _, written in batch:
            if not written.done():
                written.set_result(None)


class AsyncExecutor:
    """Executes the jobs of one asyncio worker, many at a time."""

    def __init__(self, config: RunConfig) -> None:
        self.name = str(ids.WorkerId.of_this_process())
        self._config = config
        self._identity = identity(config, WorkerKind.ROLLOUTS)
        self._sync_client = redis.Redis.from_url(config.redis_url, socket_timeout=TIMEOUT_S)
        # The client's own time-out swallows cancellations on Python 3.11; callers set one with asyncio.timeout.
        self._client = redis.asyncio.Redis.from_url(config.redis_url, socket_timeout=None)
        self.lag = config.lag.watch(f"rollouts@{self.name}", redis_publisher(self._client))
        self._silence_s = config.recovery.lease_s / 2
        self._outbox = Outbox(self._client)
        self._limits: dict[str, asyncio.Timeout] = {}  # lease -> the time limit of its body
        self._ended: set[str] = set()  # leases whose run has ended before their bodies
        self._leases = LeaseKeeper(
            self._sync_client,
            worker=self.name,
            lease_s=config.recovery.lease_s,
            alive=self.ticks,
            blocked_at=self.blocked_at,
            run_ended=self._on_run_ended,
        )

    def ticks(self) -> bool:
        """Whether the event loop is not blocked."""
        return self.silent_s() < self._silence_s

    def silent_s(self) -> float:
        """Since the event loop last ran."""
        return time.monotonic() - self.lag.last_tick

    def blocked_at(self) -> str:
        """What the event loop executes at this moment."""
        return blocked_place(self._loop_thread)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the lag sampler and the outbox; if either fails, the worker stops with its error."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
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

    def _on_run_ended(self, leases: Collection[str]) -> None:
        """Called by the thread of the leases."""
        self._loop.call_soon_threadsafe(self._end_bodies, leases)

    def _end_bodies(self, leases: Collection[str]) -> None:
        """Their run would neither read their replies nor sweep their files."""
        for lease in leases:
            limit = self._limits.get(lease)
            if limit and not limit.expired():
                self._ended.add(lease)
                limit.reschedule(self._loop.time())

    async def execute(self, stage: Stage[Any, Any], job: Message, player: "Player | None" = None) -> None:
        execution = Execution(stage=stage, job=job, worker=self.name, identity=self._identity)
        if refusal := execution.declined():
            await self._outbox.write(lambda pipe: write_reply(pipe, execution, refusal.content))
            return
        asked: list[str] = []
        ASKED.set(asked)  # of this asyncio task, which executes one message
        value = self._leases.hold(execution.lease, asked)
        limit = asyncio.timeout(job.timeout_s + GRACE_S)
        try:
            await self._outbox.write(lambda pipe: write_lease(pipe, execution.lease, value))
            async with limit:
                self._limits[execution.lease] = limit
                result = await stage.body(execution.call(self._config, player))
            reply = execution.done(result)
        except BaseException as error:  # noqa: BLE001  any error becomes the reply, and is raised again below
            if isinstance(error, TimeoutError) and limit.expired():
                ended = execution.lease in self._ended
                error = Terminated("the run has ended") if ended else execution.timed_out()
            reply = execution.failed(error, released=isinstance(error, Terminated) or _is_asked_to_stop(error))
        self._limits.pop(execution.lease, None)
        self._ended.discard(execution.lease)
        try:
            await self._outbox.write(lambda pipe: write_reply(pipe, execution, reply.content))
        finally:
            self._leases.drop(execution.lease)
        if reply.failure is not None:
            raise reply.failure


class SyncExecutor:
    """Executes the jobs of one prefork child, one at a time."""

    def __init__(self, config: RunConfig) -> None:
        self.name = str(ids.WorkerId.of_this_process())
        self._config = config
        self._identity = identity(config, WorkerKind.COMPUTE)
        self._client = redis.Redis.from_url(config.redis_url, socket_timeout=TIMEOUT_S)
        lease_client = redis.Redis.from_url(config.redis_url, socket_timeout=TIMEOUT_S)
        self._leases = LeaseKeeper(lease_client, worker=self.name, lease_s=config.recovery.lease_s)
        self._leases.start()

    def execute(self, stage: Stage[Any, Any], job: Message) -> None:
        execution = Execution(stage=stage, job=job, worker=self.name, identity=self._identity)
        if refusal := execution.declined():
            self._write(lambda pipe: write_reply(pipe, execution, refusal.content))
            return
        value = self._leases.hold(execution.lease)
        try:
            self._write(lambda pipe: write_lease(pipe, execution.lease, value))
            reply = execution.done(stage.body(execution.call(self._config)))
        except BaseException as error:  # noqa: BLE001  as above
            reply = execution.failed(error, released=isinstance(error, WorkerStopping))
        try:
            self._write(lambda pipe: write_reply(pipe, execution, reply.content))
        finally:
            self._leases.drop(execution.lease)
        if reply.failure is not None:
            raise reply.failure

    def _write(self, write: Write) -> None:
        """Repeated until Redis accepts it: it may be away or out of memory."""
        pause_s = RETRY_FIRST_S
        while True:
            try:
                with self._client.pipeline() as pipe:
                    pipe.expire(*write(pipe))
                    pipe.execute()
                return
            except (RedisError, OSError) as error:
                logger.warning("action=redis_write_waits again_in_s=%.1f error=%s", pause_s, error)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)


def sync_executor() -> SyncExecutor:
    """The executor of this prefork child, created at its first job: connections do not survive a fork."""
    return _executor_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _executor_of(pid: int) -> SyncExecutor:
    _raise_at_cold_stop()
    return SyncExecutor(settings())


def _raise_at_cold_stop() -> None:
    """A cold stop sends SIGTERM to the children: the running job then replies `released`. Billiard sets its own handler
    when a child has been initialized, so this one is set at the first job. It calls billiard's, which exits."""
    exits = signal.getsignal(signal.SIGTERM)

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        with contextlib.suppress(SystemExit):
            if callable(exits):
                exits(signum, frame)
        raise WorkerStopping("stopping")

    signal.signal(signal.SIGTERM, stop)


def _is_asked_to_stop(error: BaseException) -> bool:
    """Whether the pool has cancelled this task; else the cancellation is of the body's own making."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
