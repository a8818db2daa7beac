"""Where a loop sends what would block it: bounded pools, each a loop's own, for blocking I/O, CPU work and files.

At the bound a caller is suspended until a thread is free, in order of arrival; nothing queues up inside a pool.
Cancelled while suspended, the function never runs. Cancelled while it runs, the caller goes on at once, but the
function runs to its end and keeps its thread until then: nothing can interrupt a thread. Context variables follow.
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

P = ParamSpec("P")
T = TypeVar("T")

# A job may have one call for its own bytes and one for the library it uses under way: with Python's default of
# cores + 4, 256 concurrent rollouts queued behind each other's files and name look-ups.
IO_THREADS_PER_JOB = 2
# 512 threads in use take 48 MB. More blocking calls at once need a second process, not more threads.
IO_THREADS_MAX = 512
# Recording a turn is 0.5 ms of Python between system calls that hardly wait. On the wide pool, 256 rollouts took the
# GIL from the loop and from each other: 30-60 changes of thread a turn, and more CPU than on 4 or 16 threads. On a
# network where a call takes 5 ms, eight still record 400 turns a second.
FILE_THREADS = 8
# For loops that nobody sized.
DEFAULT_CONCURRENCY = 64
# Only what others hand to the default executor directly (asyncio.to_thread, name look-ups) can wait inside a pool.
# That many waiting means that the threads are stuck: refuse rather than grow.
BACKLOG_MAX = 8 * IO_THREADS_MAX


class Pool(ThreadPoolExecutor):
    """Named threads of one loop. `run` is for coroutines of that loop; `submit` serves as the loop's executor."""

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
        ended: asyncio.Future[T] = loop.create_future()
        call.add_done_callback(lambda call: self._tell(loop, call, ended))
        return await ended

    def _tell(self, loop: asyncio.AbstractEventLoop, call: Future[T], ended: "asyncio.Future[T]") -> None:
        """In the thread: the loop is woken once for the outcome and for the thread that is free again."""
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits for either
            loop.call_soon_threadsafe(self._end, call, ended)

    def _end(self, call: Future[T], ended: "asyncio.Future[T]") -> None:
        self._free.release()
        if ended.done():  # the caller was cancelled
            return
        if error := call.exception():
            ended.set_exception(error)
        else:
            ended.set_result(call.result())

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._work_queue.qsize() >= BACKLOG_MAX:
            raise InfrastructureFailure(
                f"The pool {self.name!r} has {BACKLOG_MAX} calls waiting for its {self.threads} threads: they are "
                "stuck. Look at what they do (py-spy dump), most often a file system or a server that does not answer."
            )
        return super().submit(fn, *args, **kwargs)


class IoPool(Pool):
    """The default executor of its loop; the other two pools, and what was promised an end, end when the loop ends this
    one."""

    def __init__(self, *, threads: int, cpu_threads: int) -> None:
        super().__init__(name="io", threads=threads)
        self.cpu = Pool(name="cpu", threads=cpu_threads)
        self.files = Pool(name="files", threads=min(threads, FILE_THREADS))
        self.ends: list[Callable[[], None]] = []

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self.ends:
            self.ends.pop()()
        for other in (self.cpu, self.files):
            other.shutdown(wait, cancel_futures=cancel_futures)
        super().shutdown(wait, cancel_futures=cancel_futures)


_pools: dict[asyncio.AbstractEventLoop, IoPool] = {}


def cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The cores that this process may use: its affinity, and a container's share of the CPU's time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = cpu_max.read_text().split()
    except OSError:
        return allowed
    return allowed if quota_us == "max" else min(allowed, math.ceil(int(quota_us) / int(period_us)))


def install(
    loop: asyncio.AbstractEventLoop, *, concurrency: int = DEFAULT_CONCURRENCY, cpu_threads: int | None = None
) -> IoPool:
    """Give `loop` its pools, for `concurrency` jobs at once. Whoever ends the default executor ends all."""
    threads = min(IO_THREADS_PER_JOB * concurrency, IO_THREADS_MAX)
    pool = IoPool(threads=threads, cpu_threads=cpu_threads or cores())
    loop.set_default_executor(pool)
    for closed in [other for other in list(_pools) if other.is_closed()]:
        _pools.pop(closed, None)
    _pools[loop] = pool
    return pool


async def in_io_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For what waits: sockets of synchronous libraries, programs, SQLite, one file now and then."""
    return await _pool().run(fn, *args, **kwargs)


async def in_file_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For small files, when hundreds of jobs write them at once."""
    return await _pool().files.run(fn, *args, **kwargs)


async def in_cpu_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For what computes more than ~1 ms and releases the GIL while it does."""
    return await _pool().cpu.run(fn, *args, **kwargs)


def call_at_shutdown(end: Callable[[], None]) -> None:
    """Called when the running loop's pools end, in a thread that may block."""
    _pool().ends.append(end)


def _pool() -> IoPool:
    loop = asyncio.get_running_loop()
    return _pools.get(loop) or install(loop)
