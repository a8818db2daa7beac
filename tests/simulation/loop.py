"""An event loop with a simulated clock, and the simulated processes whose tasks run on it.

Time passes only when no callback is ready: the clock jumps to the next timer. A callback belongs to the process in
whose context it was scheduled. A killed process runs nothing again, not even its `finally`; a paused one runs later.
"""

import asyncio
import contextvars
import errno
import heapq
from collections.abc import Callable, Coroutine
from typing import Any

PROCESS: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)
START_S = 1_000_000.0


class Killed(BaseException):
    """Unwinds the code of a process that was killed while it ran."""


class OutOfTime(Exception):
    """The simulated time is over."""


class Process:
    """Tasks that live and die together. Everything outside is the world, which has no process."""

    def __init__(self, name: str, loop: "SimulatedLoop") -> None:
        self.name = name
        self.alive = True
        self.loop = loop
        self.held: list[asyncio.Handle] | None = None
        """callbacks of a paused process, else None"""
        self.signals: dict[int, Callable[[], object]] = {}
        self.at_kill: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(work, context=self._context.copy())

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks = [each for each in self._tasks if not each.done()]
        self._tasks.append(task)

    def kill(self) -> None:
        """No callback of it runs again. Its coroutines are closed when the current callback has ended."""
        if self.alive:
            self.alive = False
            self.loop.call_soon(self._close, context=contextvars.Context())

    def _close(self) -> None:
        for after in self.at_kill:
            after()
        for task in self._tasks:
            task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
            if task.done():
                if not task.cancelled():
                    task.exception()  # retrieved: asyncio does not report it
                continue
            self._context.copy().run(_close, task.get_coro())
        self._tasks, self.held = [], None

    def pause(self, seconds: float) -> None:
        if self.held is None and self.alive:
            self.held = []
            self.loop.call_later(seconds, self._resume, context=contextvars.Context())

    def _resume(self) -> None:
        held, self.held = self.held or [], None
        self.loop._ready.extend(held)  # pyright: ignore[reportAttributeAccessIssue]


def _close(coroutine: Any) -> None:
    """A `finally` that awaits something must be closed again."""
    for _ in range(20):
        try:
            coroutine.close()
        except BaseException:  # noqa: BLE001  whatever its clean-up raises: the process is dead
            continue
        return


class SimulatedLoop(asyncio.BaseEventLoop):
    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self.now = START_S
        self._limit = START_S + limit_s
        self.set_task_factory(_new_task)

    def time(self) -> float:
        return self.now

    def _write_to_self(self) -> None:
        pass  # the other threads run only while this one waits for them

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        process = PROCESS.get()
        assert process is not None
        process.signals[sig] = lambda: callback(*args)

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """There is no network: the engine is the workers' matter."""
        raise ConnectionRefusedError(errno.ECONNREFUSED, "there is no network in a simulation")

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # pyright: ignore[reportAttributeAccessIssue]
        if self._timer_cancelled_count > 50 and 2 * self._timer_cancelled_count > len(scheduled):  # pyright: ignore[reportAttributeAccessIssue]
            self._forget_cancelled()
        while scheduled and scheduled[0]._cancelled:
            self._take_timer()
        if not ready and scheduled:
            self.now = max(self.now, scheduled[0]._when)
            if self.now > self._limit:
                self._limit = float("inf")
                raise OutOfTime
        elif not ready:
            raise AssertionError("every task waits, and no timer is set")
        while scheduled and scheduled[0]._when <= self.now:
            ready.append(self._take_timer())
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is None:
                handle._run()
            elif process.alive and process.held is not None:
                process.held.append(handle)
            elif process.alive:
                handle._run()

    def _forget_cancelled(self) -> None:
        scheduled = self._scheduled  # pyright: ignore[reportAttributeAccessIssue]
        for handle in scheduled:
            handle._scheduled = not handle._cancelled
        scheduled[:] = [handle for handle in scheduled if handle._scheduled]
        heapq.heapify(scheduled)
        self._timer_cancelled_count = 0

    def _take_timer(self) -> asyncio.TimerHandle:
        handle = heapq.heappop(self._scheduled)  # pyright: ignore[reportAttributeAccessIssue]
        handle._scheduled = False
        if handle._cancelled:
            self._timer_cancelled_count -= 1  # pyright: ignore[reportAttributeAccessIssue]
        return handle


def _new_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(coro, loop=loop, **options)
    context = options.get("context")
    process = context.get(PROCESS) if context is not None else PROCESS.get()
    if process is not None:
        process.adopt(task)
    return task
