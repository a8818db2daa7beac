"""An execution pool for Celery that runs `async def` tasks concurrently, on one event loop per process.

Two threads: the hub thread is Celery's main thread (messages, acknowledgements, events, all callbacks of a Request) and
owns `_waiting`, `_active` and `_bodies`; the loop thread runs the bodies. Made for early acknowledgement, ignored
results and `worker_disable_prefetch`: a body gets its arguments and no more (no `self.request`, no retries, no links).
A body is cancelled with the reason as the message of its CancelledError: "stopping", "revoked" or "time limit".
"""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from inspect import iscoroutinefunction, unwrap
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.concurrency.base import BasePool
from celery.exceptions import SoftTimeLimitExceeded, Terminated, TimeLimitExceeded, WorkerShutdown, WorkerTerminate
from celery.platforms import EX_FAILURE
from celery.worker.state import maybe_shutdown
from kombu.asynchronous.hub import Hub

from penstock.errors import ConfigError, PenstockError, StageError
from penstock.event_loop import event_loop_factory
from workers import stop_signals
from workers.hub_calls import HubCalls
from workers.loop_thread import LoopThread

logger = logging.getLogger("workers.asyncio_pool")

STOPPING, REVOKED, TIME_LIMIT = "stopping", "revoked", "time limit"
# How often the main thread looks around while it waits in start-up and shut-down, where no hub wakes it.
LOOK_S = 0.02


@dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class Job:
    """One delivery of a message: a message delivered twice is two jobs. The Request holds it by weak reference only."""

    pool: "AsyncioPool"
    name: str
    id: str
    request: dict[str, Any]
    soft_s: float | None
    hard_s: float | None
    on_accepted: Callable[[int, float], None]
    on_outcome: Callable[[tuple[int, ExceptionInfo | None, float]], None]
    body: "asyncio.Task[None] | None" = None
    started_s: float = 0.0
    cancelled_for: str | None = None

    def terminate(self, signal: int | None = None) -> None:
        """Called by the Request, which has announced that the task is revoked."""
        self.pool.revoke(self)


class AsyncioPool(BasePool):
    app: Celery
    limit: int
    # A warm stop waits for rollouts, which take minutes; one that takes longer is released and runs elsewhere.
    drain_s = 600.0
    # What a cancelled body may take to say so: one small write to Redis, or its time-out.
    release_s = 5.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: deque[Job] = deque()  # over the limit: not accepted, not acknowledged
        self._active: set[Job] = set()  # has a slot: Celery waits for the outcome
        self._bodies: set[Job] = set()  # is on the loop: active, or cancelled and still cleaning up
        self._started = self._finished = 0
        self._calls = HubCalls()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """To be overridden: what surrounds all bodies, on their loop. If it ends early, the worker stops."""
        yield

    def loop_lag(self) -> dict[str, Any] | None:
        """To be overridden: for `celery inspect stats`."""
        return None

    def _get_info(self) -> dict[str, Any]:
        return super()._get_info() | {
            "processes": [os.getpid()],
            "active": len(self._active),
            "waiting": len(self._waiting),
            "leaving": len(self._bodies - self._active),
            "started": self._started,
            "finished": self._finished,
            "loop": type(self._thread.loop).__module__,
            "loop_lag": self.loop_lag(),
        }

    # Start and stop: on the hub thread, while the hub does not poll.

    def on_start(self) -> None:
        if threading.current_thread() is threading.main_thread():
            stop_signals.install()
        self._thread = LoopThread(event_loop_factory(concurrency=self.limit)(), self.lifespan)
        self._thread.start()
        try:
            while not self._thread.wait_entered(LOOK_S):
                maybe_shutdown()
        except PenstockError as error:
            logger.critical("action=start_failed: %s", error)
            raise WorkerShutdown(EX_FAILURE) from error
        self._thread.ended.add_done_callback(lambda _: self._calls.post(self._on_lifespan_ended))

    def on_stop(self) -> None:
        """Warm: bodies finish, unless it takes too long or a second signal asks to stop."""
        lost = self._thread.ended.done
        self._wait_until(lambda: not self._active or stop_signals.stop_asked() or lost(), self.drain_s)
        self.on_terminate()

    def on_terminate(self) -> None:
        """Cold: bodies are cancelled and have `release_s` to clean up."""
        for job in self._active:
            self._thread.loop.call_soon_threadsafe(self._cancel, job, STOPPING)
        self._wait_until(lambda: not self._bodies, self.release_s)
        if self._bodies:
            logger.warning("action=bodies_abandoned count=%d after_s=%g", len(self._bodies), self.release_s)
        self._thread.stop(self.release_s)

    def _wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done() and time.monotonic() < deadline:
            self._calls.run()
            time.sleep(LOOK_S)

    def _on_lifespan_ended(self) -> None:
        if self.active:
            logger.critical("action=lifespan_ended: the worker stops", exc_info=self._thread.ended.exception())
            raise WorkerTerminate(EX_FAILURE)

    # The hub thread.

    def register_with_event_loop(self, loop: Hub) -> None:
        self._calls.register(loop)

    def apply_async(  # pyright: ignore[reportIncompatibleMethodOverride]  # untyped, taken to return None
        self,
        target: object,
        args: tuple[str, str, dict[str, Any], object, object, object],
        *,
        callback: Callable[..., None],
        accept_callback: Callable[..., None],
        soft_timeout: float | None = None,
        timeout: float | None = None,
        **_: object,
    ) -> Job:
        """Not `on_apply`: on the way there the base class logs the arguments. `target`, the tracer, is not used."""
        name, task_id, request = args[:3]
        job = Job(
            pool=self,
            name=name,
            id=task_id,
            request=request,
            soft_s=soft_timeout or self.options.get("soft_timeout"),
            hard_s=timeout or self.options.get("timeout"),
            on_accepted=accept_callback,
            on_outcome=callback,
        )
        self._waiting.append(job)
        self._start_waiting()
        return job

    def _start_waiting(self) -> None:
        while self.active and self._waiting and len(self._active) < self.limit:
            job = self._waiting.popleft()
            self._active.add(job)
            self._started += 1
            job.on_accepted(os.getpid(), time.monotonic())
            if job in self._active:  # else it was revoked while it waited
                self._bodies.add(job)
                self._thread.loop.call_soon_threadsafe(self._spawn, job)

    def flush(self) -> None:
        """The connection is lost or closing: what was not acknowledged will be delivered again, here or elsewhere."""
        self._waiting.clear()

    def grow(self, n: int = 1) -> None:
        self.limit += n
        self._start_waiting()

    def shrink(self, n: int = 1) -> None:
        self.limit = max(1, self.limit - n)

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Nothing: all bodies have this process's id. `Job.terminate`, called next, knows which one is meant."""

    def revoke(self, job: Job) -> None:
        if job in self._active:
            self._thread.loop.call_soon_threadsafe(self._cancel, job, REVOKED)
            self._free(job)

    def _free(self, job: Job) -> None:
        self._active.remove(job)
        self._finished += 1
        self._start_waiting()

    def _on_end(self, job: Job, error: BaseException | None, runtime_s: float) -> None:
        self._bodies.remove(job)
        self._finish(job, error, runtime_s)

    def _finish(self, job: Job, error: BaseException | None, runtime_s: float) -> None:
        if job not in self._active:  # revoked or past its hard limit: told before
            return
        self._free(job)
        if error is None:
            logger.info("Task %s[%s] succeeded in %.3fs", job.name, job.id, runtime_s)
            job.on_outcome((0, None, runtime_s))
            return
        if isinstance(error, Terminated):
            logger.warning("Task %s[%s] released after %.3fs: %s", job.name, job.id, runtime_s, error)
        else:
            logger.error("Task %s[%s] failed: %r", job.name, job.id, error, exc_info=error)
        job.on_outcome((1, _exception_info(error), runtime_s))

    # The loop thread.

    def _spawn(self, job: Job) -> None:
        loop = self._thread.loop
        job.started_s = time.monotonic()
        job.body = loop.create_task(self._run(job), name=job.id)
        timers = [
            loop.call_later(limit_s, expire, job, limit_s)
            for limit_s, expire in [(job.soft_s, self._expire_softly), (job.hard_s, self._expire)]
            if limit_s
        ]
        job.body.add_done_callback(lambda body: self._end(job, body, timers))

    async def _run(self, job: Job) -> None:
        run = self.app.tasks[job.name].run
        if not _is_async(run):
            queue = job.request["delivery_info"]["routing_key"]
            raise ConfigError(
                f"{job.name} is not an `async def`, and queue {queue} is served by the asyncio pool, which runs "
                "nothing else. Route it to a queue of the compute workers, or make it a coroutine."
            )
        try:
            await run(*job.request["args"], **job.request["kwargs"])
        except (SystemExit, KeyboardInterrupt) as error:
            raise StageError(f"{job.name} tried to end the process: {error!r}") from error

    def _cancel(self, job: Job, reason: str) -> None:
        if job.body is not None:  # else it was revoked before it was spawned
            job.cancelled_for = reason
            job.body.cancel(reason)

    def _expire_softly(self, job: Job, limit_s: float) -> None:
        if job.cancelled_for is None:  # else it is cleaning up, which must not be cancelled
            self._cancel(job, TIME_LIMIT)

    def _expire(self, job: Job, limit_s: float) -> None:
        self._cancel(job, TIME_LIMIT)
        self._calls.post(self._finish, job, TimeLimitExceeded(limit_s), limit_s)

    def _end(self, job: Job, body: "asyncio.Task[None]", timers: list[asyncio.TimerHandle]) -> None:
        for timer in timers:
            timer.cancel()
        error = _cancellation(job) if body.cancelled() else body.exception()
        self._calls.post(self._on_end, job, error, time.monotonic() - job.started_s)


@cache
def _is_async(run: Callable[..., Any]) -> bool:
    return iscoroutinefunction(unwrap(run))  # `pydantic=True` wraps the coroutine function in a plain one


def _cancellation(job: Job) -> BaseException:
    if job.cancelled_for == TIME_LIMIT:
        return SoftTimeLimitExceeded(job.soft_s)
    if job.cancelled_for is not None:
        return Terminated(job.cancelled_for)
    return asyncio.CancelledError("the body cancelled itself")


def _exception_info(error: BaseException) -> ExceptionInfo:
    try:
        raise error  # ExceptionInfo needs a traceback, and an error made by us has none yet
    except type(error):
        info = ExceptionInfo()
        info.exception = error  # pyright: ignore[reportAttributeAccessIssue]  # as Celery's tracer leaves it
        return info
    finally:
        del error  # or a cycle, through the traceback and this frame, keeps the body's locals
