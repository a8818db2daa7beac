"""Bounded thread pools of an event loop, for blocking I/O, CPU work and small files.

If all threads are busy, callers wait in order of arrival. A caller cancelled while it waits never runs its function. A
caller cancelled while its function runs returns at once; the function runs to its end and keeps its thread, since a
thread cannot be interrupted. Context variables are passed on.
"""

import asyncio
import contextlib
import contextvars
import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from penstock.errors import InfrastructureFailure
from penstock.runtime.cancellation import run_to_completion

P = ParamSpec("P")
T = TypeVar("T")

# A job may have a call of its own and one of a library in flight. With Python's default of cores + 4 threads, 256
# concurrent rollouts waited for each other's files and DNS lookups.
IO_THREADS_PER_JOB = 2
# 512 threads in use take 48 MB. More blocking calls at once need a second process, not more threads.
IO_THREADS_MAX = 512
# Recording a turn is 0.5 ms of Python between system calls that hardly wait. On the wide pool, 256 rollouts competed
# for the GIL with the loop and each other: 30-60 thread switches per turn, and more CPU than on 4 or 16 threads. On a
# network file system with 5 ms per call, eight threads still record 400 turns per second.
FILE_THREADS = 8
# For loops without an explicit `install`.
DEFAULT_CONCURRENCY = 64
# Only direct calls of the default executor (asyncio.to_thread, DNS lookups) queue inside a pool. A queue of this length
# means that the threads are stuck: refuse instead of growing.
BACKLOG_MAX = 8 * IO_THREADS_MAX


class Pool(ThreadPoolExecutor):
    """Named threads of one loop. Coroutines of the loop call `run`; the loop, as its executor, calls `submit`."""

    def __init__(self, *, name: str, threads: int) -> None:
        super().__init__(threads, thread_name_prefix=f"penstock-{name}")
        self.name = name
        self.threads = threads
        self._free = asyncio.Semaphore(threads)

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
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
        """Runs in the thread: wakes the loop once, both to deliver the result and to free the thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(self._deliver, call, result)

    def _deliver(self, call: Future[T], result: "asyncio.Future[T]") -> None:
        self._free.release()
        if result.done():  # the caller was cancelled
            return
        if error := call.exception():
            result.set_exception(error)
        else:
            result.set_result(call.result())

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._work_queue.qsize() >= BACKLOG_MAX:
            raise InfrastructureFailure(
                f"The pool {self.name!r} has {BACKLOG_MAX} calls waiting for its {self.threads} threads: they are "
                "stuck. Find out where (py-spy dump); usually a file system or a server does not respond."
            )
        return super().submit(fn, *args, **kwargs)


class IoPool(Pool):
    """The default executor of its loop. Shutting it down runs the shutdown callbacks and shuts down the other pools."""

    def __init__(self, *, threads: int, cpu_threads: int) -> None:
        super().__init__(name="io", threads=threads)
        self.cpu = Pool(name="cpu", threads=cpu_threads)
        self.files = Pool(name="files", threads=min(threads, FILE_THREADS))
        self.shutdown_callbacks: list[Callable[[], None]] = []

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self.shutdown_callbacks:
            self.shutdown_callbacks.pop()()
        for other in (self.cpu, self.files):
            other.shutdown(wait, cancel_futures=cancel_futures)
        super().shutdown(wait, cancel_futures=cancel_futures)


_pools: dict[asyncio.AbstractEventLoop, IoPool] = {}


def cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The cores that this process may use, by its CPU affinity and the CPU quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = cpu_max.read_text().split()
    except OSError:
        return allowed
    return allowed if quota_us == "max" else min(allowed, math.ceil(int(quota_us) / int(period_us)))


def install(
    loop: asyncio.AbstractEventLoop, *, concurrency: int = DEFAULT_CONCURRENCY, cpu_threads: int | None = None
) -> IoPool:
    """Give `loop` its pools, for `concurrency` concurrent jobs. Shutting down the default executor shuts down all."""
    threads = min(IO_THREADS_PER_JOB * concurrency, IO_THREADS_MAX)
    pool = IoPool(threads=threads, cpu_threads=cpu_threads or cores())
    loop.set_default_executor(pool)
    for closed in [other for other in list(_pools) if other.is_closed()]:
        _pools.pop(closed, None)
    _pools[loop] = pool
    return pool


async def in_io_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For blocking calls: sockets of synchronous libraries, programs, SQLite, an occasional file."""
    return await _pool().run(fn, *args, **kwargs)


async def to_its_end_in_io_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For files that are written again and again: a cancelled caller waits for the end of its call, so that an old
    content cannot replace a newer one."""
    return await run_to_completion(asyncio.create_task(in_io_thread(fn, *args, **kwargs)))


async def in_file_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For small files that hundreds of jobs write concurrently."""
    return await _pool().files.run(fn, *args, **kwargs)


async def in_cpu_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For computations of more than ~1 ms that release the GIL."""
    return await _pool().cpu.run(fn, *args, **kwargs)


def call_at_shutdown(callback: Callable[[], None]) -> None:
    """Register a callback for the shutdown of the running loop's pools. It runs in a thread and may block."""
    _pool().shutdown_callbacks.append(callback)


def _pool() -> IoPool:
    loop = asyncio.get_running_loop()
    return _pools.get(loop) or install(loop)
