"""An execution pool for Celery that runs `async def` tasks concurrently, on one event loop per process.

Everything here runs on the hub thread, which is Celery's main thread; the bodies run on the loop thread. Requires early
acknowledgement, ignored results and `worker_disable_prefetch`: a body gets its arguments only (no `self.request`, no
retries, no links). Invariant: every body that was started is in `_bodies` until it has ended.
"""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from celery import Celery
from celery.concurrency.base import BasePool
from celery.exceptions import Terminated, WorkerShutdown
from celery.platforms import EX_FAILURE
from celery.worker.state import maybe_shutdown
from kombu.asynchronous.hub import Hub

from headpond.errors import HeadpondError, RunError
from headpond.event_loop.factory import event_loop_factory
from headpond.workers import stop_signals
from headpond.workers.delivery import REVOKED, STOPPING, Delivery, exception_info
from headpond.workers.hub_calls import HubCalls
from headpond.workers.loop_thread import LoopThread

logger = logging.getLogger("headpond.workers.asyncio_pool")

# The main thread polls at start-up and shut-down, where no hub wakes it.
POLL_S = 0.02


class AsyncioPool(BasePool):
    app: Celery
    limit: int
    # Seconds that a warm stop waits for bodies, before it cancels them.
    drain_s = 60.0
    # Seconds for a cancelled body to write its reply: one small write to Redis, or its time-out.
    release_s = 5.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: deque[Delivery] = deque()  # over the limit: neither accepted nor acknowledged
        self._active: set[Delivery] = set()  # have a slot: Celery waits for the outcome
        self._bodies: set[Delivery] = set()  # active, or cancelled and cleaning up
        self._started = self._finished = 0

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """Override to surround all bodies, on their loop. If it ends early, the worker stops."""
        yield

    def loop_lag(self) -> dict[str, Any] | None:
        """Override to add the loop's lag to `celery inspect stats`."""
        return None

    def on_start(self) -> None:
        if threading.current_thread() is threading.main_thread():
            stop_signals.install()
        self._thread = LoopThread(event_loop_factory(concurrency=self.limit)(), self.lifespan)
        self._calls = HubCalls(self._thread.loop)
        self._thread.start()
        try:
            while not self._thread.wait_entered(POLL_S):
                maybe_shutdown()
        except HeadpondError as error:
            logger.critical("action=start_failed: %s", error)
            raise WorkerShutdown(EX_FAILURE) from error
        self._thread.ended.add_done_callback(lambda _: self._on_loop(self._calls.post, self._on_lifespan_ended))

    def on_stop(self) -> None:
        """Warm stop: bodies finish, up to `drain_s` or a second signal. The hub does not poll any more."""
        logger.info("action=drain active=%d drain_s=%g", len(self._active), self.drain_s)
        lifespan_ended = self._thread.ended.done
        self._wait_until(lambda: not self._active or stop_signals.stop_requested() or lifespan_ended(), self.drain_s)
        self.on_terminate()

    def on_terminate(self) -> None:
        """Cold stop: bodies are cancelled and have `release_s` to clean up."""
        for delivery in self._active:
            self._on_loop(delivery.cancel, STOPPING)
        self._wait_until(lambda: not self._bodies, self.release_s)
        if self._bodies:
            logger.warning("action=bodies_abandoned count=%d after_s=%g", len(self._bodies), self.release_s)
        self._thread.stop(self.release_s)

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
    ) -> Delivery:
        """Overridden instead of `on_apply`, because the base class logs the arguments before it. `target`, Celery's
        tracer, is not used."""
        name, task_id, request = args[:3]
        delivery = Delivery(
            name=name,
            id=task_id,
            run=self.app.tasks[name].run,
            request=request,
            soft_s=soft_timeout or self.options.get("soft_timeout"),
            hard_s=timeout or self.options.get("timeout"),
            on_accepted=accept_callback,
            on_outcome=callback,
            on_revoked=self._on_revoked,
            report=self._post_report,
        )
        self._waiting.append(delivery)
        self._start_waiting()
        return delivery

    def flush(self) -> None:
        """Called when the connection is lost or closing: messages that are not acknowledged will be delivered again."""
        self._waiting.clear()

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Does nothing: all bodies have this process's id. Celery calls `Delivery.terminate` of the right one next."""

    def grow(self, n: int = 1) -> None:
        self.limit += n
        self._start_waiting()

    def shrink(self, n: int = 1) -> None:
        self.limit = max(1, self.limit - n)

    def _get_info(self) -> dict[str, Any]:
        return super()._get_info() | {
            "processes": [os.getpid()],
            "active": len(self._active),
            "waiting": len(self._waiting),
            "leaving": len(self._bodies - self._active),
            "started": self._started,
            "finished": self._finished,
            "tasks": len(asyncio.all_tasks(self._thread.loop)),
            "loop": type(self._thread.loop).__module__,
            "loop_lag": self.loop_lag(),
        }

    def _start_waiting(self) -> None:
        while self.active and self._waiting and len(self._active) < self.limit:
            delivery = self._waiting.popleft()
            self._active.add(delivery)
            self._started += 1
            delivery.on_accepted(os.getpid(), time.monotonic())
            if delivery in self._active:  # else it was revoked while waiting
                self._bodies.add(delivery)
                self._on_loop(delivery.start)

    def _free(self, delivery: Delivery) -> None:
        self._active.remove(delivery)
        self._finished += 1
        self._start_waiting()

    def _on_revoked(self, delivery: Delivery) -> None:
        if delivery in self._active:
            self._on_loop(delivery.cancel, REVOKED)
            self._free(delivery)

    def _on_report(self, delivery: Delivery, error: BaseException | None, runtime_s: float, ended: bool) -> None:
        if ended:
            self._bodies.remove(delivery)
        if delivery not in self._active:  # revoked, or past its hard limit: already settled
            return
        self._free(delivery)
        if error is None:
            logger.info("Task %s[%s] succeeded in %.3fs", delivery.name, delivery.id, runtime_s)
            delivery.on_outcome((0, None, runtime_s))
            return
        if isinstance(error, Terminated):
            logger.warning("Task %s[%s] released after %.3fs: %s", delivery.name, delivery.id, runtime_s, error)
        else:
            logger.error("Task %s[%s] failed: %r", delivery.name, delivery.id, error, exc_info=error)
        delivery.on_outcome((1, exception_info(error), runtime_s))

    def _on_lifespan_ended(self) -> None:
        if self.active:  # else the pool itself has stopped it
            error = self._thread.ended.exception()
            raise RunError(f"the worker stops: its lifespan ended with {error!r}") from error

    def _post_report(self, delivery: Delivery, error: BaseException | None, runtime_s: float, ended: bool) -> None:
        self._calls.post(self._on_report, delivery, error, runtime_s, ended)

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        self._thread.loop.call_soon_threadsafe(call, *args)

    def _wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done() and time.monotonic() < deadline:
            self._calls.run()
            time.sleep(POLL_S)
