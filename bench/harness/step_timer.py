"""CPU time of every step of an event loop, and of every garbage collection in its thread.

A step is one callback, or a task's execution from one await to the next: nothing else runs on the loop meanwhile.
uvloop does not expose its steps, so the process runs on asyncio's own loop. CPU time of the loop's thread is counted,
without the time it waited for a core.
"""

import asyncio
import atexit
import gc
import json
import threading
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

from penstock.runtime import event_loop
from workers.delivery import Delivery

FILE = "steps.json"
LONG_S = 0.001
FIRST = Delivery.start.__qualname__
"""the callback that starts the first job; steps before it are start-up and not counted"""


class StepTimer:
    def __init__(self) -> None:
        self.cpu_s = array("d")
        """of each step, garbage collection excluded"""
        self.collections_s = array("d")
        self._collected_s = self._collecting_since = 0.0
        self._long = Counter[str]()
        self._begun = False

    def install(self) -> None:
        """Time every loop created from now on, and write FILE to the working directory when the process exits."""
        run = asyncio.Handle._run  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]

        def timed(handle: Any) -> None:
            name = _name(handle._callback)
            self._begun |= name == FIRST
            before_s, collected_s = time.thread_time(), self._collected_s
            run(handle)
            self._note(time.thread_time() - before_s - (self._collected_s - collected_s), name)

        asyncio.Handle._run = timed  # pyright: ignore[reportAttributeAccessIssue]
        event_loop._fastest_loop = lambda: asyncio.SelectorEventLoop  # pyright: ignore[reportPrivateUsage]
        gc.callbacks.append(self._collector)
        atexit.register(self._write)

    def _note(self, cpu_s: float, name: str) -> None:
        if not self._begun:
            return
        self.cpu_s.append(cpu_s)
        if cpu_s > LONG_S:
            self._long[name] += 1

    def _collector(self, phase: str, _: dict[str, int]) -> None:
        if threading.current_thread() is threading.main_thread():  # Celery runs in the main thread, the loop in another
            return
        if phase == "start":
            self._collecting_since = time.thread_time()
            return
        spent_s = time.thread_time() - self._collecting_since
        self._collected_s += spent_s
        if self._begun:
            self.collections_s.append(spent_s)

    def _write(self) -> None:
        timings = {"cpu_s": list(self.cpu_s), "collections_s": list(self.collections_s), "long": dict(self._long)}
        Path(FILE).write_text(json.dumps(timings))


def _name(callback: Any) -> str:
    """Name of a callback; for a task, its coroutine and the innermost coroutine in which the step begins."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return getattr(callback, "__qualname__", type(callback).__name__)
    coroutine: Any = task.get_coro()
    names = [coroutine.__qualname__]
    while (coroutine := getattr(coroutine, "cr_await", None)) is not None and hasattr(coroutine, "__qualname__"):
        names.append(coroutine.__qualname__)
    return names[0] if len(names) == 1 else f"{names[0]} > {names[-1]}"
