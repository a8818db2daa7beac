"""Threads on the simulated clock: the ledger's writer thread and the pools of `event_loop/offload.py`.

A `SimulatedThread` is a real thread that runs only while the loop's thread waits for it, so that one of them runs at a
time and every interleaving follows from the seed. It lasts until it blocks on a `SimulatedQueue` or a `SimulatedEvent`.
"""

import asyncio
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from simulation.loop import PROCESS, Killed, Process, SimulatedLoop

_running: "SimulatedThread | None" = None


class SimulatedThread:
    delays: Random
    """set by the world: when a woken thread goes on"""
    loop: SimulatedLoop

    def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        process = PROCESS.get()
        assert process is not None
        assert daemon
        self.process: Process = process
        self._target = target
        self._may_run, self._has_blocked = threading.Semaphore(0), threading.Semaphore(0)
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(target=self._context.run, args=(self._main,), name=name, daemon=True)
        self.finished = False
        self.blocked_by: object = None
        self.error: BaseException | None = None
        process.at_kill.append(self.run)

    def start(self) -> None:
        self._thread.start()
        self.run()

    def run(self) -> None:
        """Until it blocks or ends. Called on the loop's thread. A killed process's thread ends."""
        global _running
        if self.finished:
            return
        _running = self
        self._may_run.release()
        self._has_blocked.acquire()
        _running = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def join(self, timeout: float | None = None) -> None:
        """What it can do without time passing."""
        while not self.finished and isinstance(self.blocked_by, SimulatedQueue) and self.blocked_by.items:
            self.run()

    def is_alive(self) -> bool:
        return not self.finished

    def block(self, on: object) -> None:
        """Called by the thread itself."""
        self.blocked_by = on
        self._has_blocked.release()
        self._may_run.acquire()
        self.blocked_by = None
        if not self.process.alive:
            raise Killed

    def wake(self, on: object, after_s: float) -> None:
        """Let it go on after `after_s`, if it still waits for `on` then."""
        self._context.copy().run(self.loop.call_later, after_s, self._go_on, on)

    def _go_on(self, on: object) -> None:
        if self.blocked_by is on:
            self.run()

    def _main(self) -> None:
        self._may_run.acquire()
        try:
            if self.process.alive:
                self._target()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  raised on the loop's thread
            self.error = error
        finally:
            self.finished = True
            self._has_blocked.release()


class SimulatedQueue:
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self.items = deque[Any]()
        self._process = PROCESS.get()
        self._waiting: SimulatedThread | None = None

    def put(self, item: object) -> None:
        if self._process is not None and not self._process.alive:
            return  # called by the clean-up of a dead process
        self.items.append(item)
        if self._waiting is not None:
            self._waiting.wake(self, delay_s(SimulatedThread.delays))

    def get(self, timeout: float | None = None) -> Any:
        if not self.items:
            assert _running is not None
            self._waiting = _running
            if timeout is not None:
                _running.wake(self, timeout)
            while not self.items:
                _running.block(self)
                if timeout is not None and not self.items:
                    raise queue.Empty
        return self.items.popleft()

    def empty(self) -> bool:
        return not self.items


class SimulatedEvent:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: SimulatedThread | None = None

    def set(self) -> None:
        self._set = True
        if self._waiting is not None:
            self._waiting._go_on(self)

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> bool:
        if not self._set:
            assert _running is not None
            self._waiting = _running
            _running.wake(self, timeout)
            _running.block(self)
        return self._set


def pause_thread(seconds: float) -> None:
    """Let the simulated thread that calls this go on after `seconds`; nothing if it is the loop's own thread."""
    if _running is not None:
        SimulatedEvent().wait(seconds)


class SimulatedPool:
    """`offload.IoPool`: a call runs at one moment between its begin and its end, which the delays decide. The caller
    may be cancelled meanwhile; the call then still runs, unless its process is killed."""

    def __init__(self, loop: SimulatedLoop, delays: Random) -> None:
        self._loop = loop
        self._delays = delays
        self.cpu = self.files = self

    async def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = self._loop.create_future()
        self._loop.call_later(delay_s(self._delays), self._call, result, lambda: fn(*args, **kwargs))
        return await result

    def _call(self, result: "asyncio.Future[Any]", call: Callable[[], Any]) -> None:
        try:
            value, error = call(), None
        except Killed:
            return
        except BaseException as raised:  # noqa: BLE001  passed to the caller
            value, error = None, raised
        self._loop.call_later(delay_s(self._delays), _deliver, result, value, error)


def _deliver(result: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if result.done():
        return
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(value)


def delay_s(delays: Random) -> float:
    """Mostly under a millisecond, now and then half a second: a busy disk."""
    return delays.random() * (0.001 if delays.random() < 0.95 else 0.5)
