"""Bounded thread pools of an event loop, for blocking I/O, CPU work and small files.

Callers wait in order of arrival if all threads are busy. A caller cancelled while it waits never
runs its function. A caller cancelled while its function runs returns at once; the function runs
to its end and holds its thread, since a thread cannot be interrupted. Context variables are
passed on.
"""

import asyncio
import contextlib
import contextvars
import math
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from time import monotonic
from typing import Any, ParamSpec, TypeVar

from headpond.errors import InfrastructureFailure
from headpond.event_loop.cancellation import run_to_completion

P = ParamSpec("P")
T = TypeVar("T")

# A job may have one call of its own and one of a library in flight. Python's default is cores + 4
# threads: 256 concurrent rollouts then waited for each other's files and DNS lookups.
IO_THREADS_PER_JOB = 2
# 512 busy threads take 48 MB. More blocking calls at once need a second process, not more threads.
IO_THREADS_MAX = 512
# Eight threads record 400 turns per second on a network file system with 5 ms per call. A wide
# pool of 60 threads competed with the loop: 6.2 instead of 5.1 ms of CPU a turn.
FILE_THREADS = 8
# A call to a local file takes a millisecond, a few on a busy machine. A slower call waits for a
# disk or a network.
SLOW_S = 0.02
# Quick calls may be too many for one thread. A second thread helps once a call has waited this
# long.
HELP_S = 0.1
# Interval of the checks for waiting calls, and for results that a slow call delays.
LOOK_S = 0.02
# A thread with quick calls to run delivers its results at this interval.
DELIVER_S = 0.005
# Used by loops without an explicit `install`.
DEFAULT_CONCURRENCY = 64
# Longest queue of calls to files, or of direct calls of the default executor (asyncio.to_thread,
# DNS lookups). A longer queue means stuck threads: refuse instead of growing.
BACKLOG_MAX = 8 * IO_THREADS_MAX


class Pool(ThreadPoolExecutor):
    """Named threads of one loop. Coroutines of the loop call `run`; the loop, as its executor, calls `submit`."""

    def __init__(self, *, name: str, threads: int) -> None:
        super().__init__(threads, thread_name_prefix=f"headpond-{name}")
        self.name = name
        self.threads = threads
        self._free = asyncio.Semaphore(threads)

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        # Callers wait here, not in the pool's queue: cancelled callers cannot pile up work behind
        # stuck threads.
        await self._free.acquire()
        try:
            call = self.submit(contextvars.copy_context().run, fn, *args, **kwargs)
        except BaseException:
            self._free.release()
            raise
        result: asyncio.Future[T] = loop.create_future()
        call.add_done_callback(lambda call: self._call_done(loop, call, result))
        return await result

    def _call_done(self, loop: asyncio.AbstractEventLoop, call: Future[T], result: "asyncio.Future[T]") -> None:
        """Wake the loop once, to deliver the result and to free the thread. Runs in the thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(self._deliver, call, result)

    def _deliver(self, call: Future[T], result: "asyncio.Future[T]") -> None:
        self._free.release()
        error = call.exception()
        _set(result, call.result() if error is None else None, error)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        self._require_room(self._work_queue.qsize())
        return super().submit(fn, *args, **kwargs)

    def _require_room(self, waiting: int) -> None:
        if waiting >= BACKLOG_MAX:
            raise InfrastructureFailure(
                f"The pool {self.name!r} has {BACKLOG_MAX} calls waiting for its {self.threads} threads: they are "
                "stuck. Find out where (py-spy dump); usually a file system or a server does not respond."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingCall:
    call: Callable[[], Any]
    result: "asyncio.Future[Any]"
    since: float


class FilePool(Pool):
    """Small calls in quick succession. One thread runs all waiting calls and wakes the loop once
    for them. Another thread helps if all are in slow calls, or if a call has waited for HELP_S."""

    # Recording a turn is 0.2 ms of Python between system calls that hardly wait. Each of them gives
    # the GIL to the loop or to another thread. One thread per call cost 21 thread switches a turn,
    # and a fifth more CPU. The loop itself must not write: a file system may block.
    def __init__(self, *, name: str, threads: int) -> None:
        super().__init__(name=name, threads=threads)
        self._waiting = deque[WaitingCall]()
        # Finished calls: the future, the result, the error. Only the loop's thread
        # removes them.
        self._done = deque[tuple["asyncio.Future[Any]", Any, BaseException | None]]()
        self._at_work = 0  # Number of working threads. Only the loop's thread changes it.
        # thread -> start of its present call. Only that thread changes its entry.
        self._begun = dict[int, float]()
        self._look: asyncio.TimerHandle | None = None

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        self._require_room(len(self._waiting))
        result: asyncio.Future[T] = loop.create_future()
        call = partial(contextvars.copy_context().run, fn, *args, **kwargs)
        self._waiting.append(WaitingCall(call=call, result=result, since=monotonic()))
        self._help(loop)
        return await result

    def _help(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a thread if one is needed, and check again while threads work."""
        if self._waiting and (not self._at_work or (self._at_work < self.threads and self._is_slow())):
            self._start(loop)
        if self._at_work and self._look is None:
            self._look = loop.call_later(LOOK_S, self._look_again, loop)

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._look = None
        self._hand_out(loop, thread_ended=False)

    def _is_slow(self) -> bool:
        """Return whether all threads are in slow calls, or the threads are too few."""
        started_at, read_at = list(self._begun.values()), monotonic()
        if len(started_at) == self._at_work and read_at - max(started_at) >= SLOW_S:
            return True
        try:
            return read_at - self._waiting[0].since >= HELP_S
        except IndexError:  # Another thread has taken it.
            return False

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self.submit(self._run_waiting, loop)
        except RuntimeError as error:  # the pool was shut down, or the system has no thread left
            while self._waiting and not self._at_work:  # A working thread would run them.
                _set(self._waiting.popleft().result, None, error)
            if not self._at_work or self._shutdown:
                return  # The executor otherwise runs it in a thread that is at work.
        self._at_work += 1

    def _run_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run waiting calls and deliver their results. Runs in a thread."""
        delivered_at, thread = monotonic(), get_ident()
        while self._waiting:
            try:
                waiting = self._waiting.popleft()
            except IndexError:  # another thread took it
                break
            self._begun[thread] = monotonic()
            # Calls to files do queue, because one thread takes them all: a cancelled one is
            # skipped.
            if not waiting.result.cancelled():
                self._done.append((waiting.result, *_outcome(waiting.call)))
            if self._done and monotonic() - delivered_at >= DELIVER_S:
                self._hand_out_soon(loop, thread_ended=False)
                delivered_at = monotonic()
        self._begun.pop(thread, None)
        self._hand_out_soon(loop, thread_ended=True)

    def _hand_out_soon(self, loop: asyncio.AbstractEventLoop, *, thread_ended: bool) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(self._hand_out, loop, thread_ended)

    def _hand_out(self, loop: asyncio.AbstractEventLoop, thread_ended: bool) -> None:
        for _ in range(len(self._done)):
            _set(*self._done.popleft())
        # A call that the executor held for a later thread was not counted.
        self._at_work = max(0, self._at_work - thread_ended)
        self._help(loop)


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001  the caller gets it
        return None, error


def _set(result: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if result.done():  # the caller was cancelled
        return
    # A future refuses StopIteration before Python 3.13, and a coroutine cannot raise it.
    if isinstance(error, StopIteration):
        refused, error = error, RuntimeError("the call raised StopIteration")
        error.__cause__ = refused
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(value)


class IoPool(Pool):
    """The default executor of its loop. Its shutdown runs the shutdown callbacks and shuts down
    the other pools."""

    def __init__(self, *, threads: int, cpu_threads: int) -> None:
        super().__init__(name="io", threads=threads)
        self.cpu = Pool(name="cpu", threads=cpu_threads)
        self.files = FilePool(name="files", threads=min(threads, FILE_THREADS))
        self.shutdown_callbacks: list[Callable[[], None]] = []

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self.shutdown_callbacks:
            self.shutdown_callbacks.pop()()
        for other in (self.cpu, self.files):
            other.shutdown(wait, cancel_futures=cancel_futures)
        super().shutdown(wait, cancel_futures=cancel_futures)


_pools: dict[asyncio.AbstractEventLoop, IoPool] = {}


def cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores that this process may use. CPU affinity and the container's CPU quota
    limit them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = cpu_max.read_text().split()
    except OSError:
        return allowed
    return allowed if quota_us == "max" else min(allowed, math.ceil(int(quota_us) / int(period_us)))


def install(
    loop: asyncio.AbstractEventLoop, *, concurrency: int = DEFAULT_CONCURRENCY, cpu_threads: int | None = None
) -> IoPool:
    """Give `loop` its pools, for `concurrency` concurrent jobs. Shutting down the default
    executor shuts down all pools."""
    threads = min(IO_THREADS_PER_JOB * concurrency, IO_THREADS_MAX)
    pool = IoPool(threads=threads, cpu_threads=cpu_threads or cores())
    loop.set_default_executor(pool)
    for closed in [other for other in list(_pools) if other.is_closed()]:
        _pools.pop(closed, None)
    _pools[loop] = pool
    return pool


async def in_io_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call: sockets of synchronous libraries, programs, SQLite, an occasional
    file."""
    return await _pool().run(fn, *args, **kwargs)


async def to_its_end_in_io_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call to its end, even if the caller is cancelled. Files that are written
    repeatedly need this: an old content must not replace a newer one."""
    return await run_to_completion(asyncio.create_task(in_io_thread(fn, *args, **kwargs)))


async def in_file_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call on small files that hundreds of jobs write concurrently."""
    return await _pool().files.run(fn, *args, **kwargs)


async def in_cpu_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a computation of more than ~1 ms that releases the GIL."""
    return await _pool().cpu.run(fn, *args, **kwargs)


def call_at_shutdown(callback: Callable[[], None]) -> None:
    """Register a callback for the shutdown of the running loop's pools. It runs in a thread and may block."""
    _pool().shutdown_callbacks.append(callback)


def _pool() -> IoPool:
    loop = asyncio.get_running_loop()
    return _pools.get(loop) or install(loop)
