"""How much CPU time each step of a loop takes, and each stop for the garbage collector.

A step is one callback, or a task's way from one await to the next: nobody else has the loop meanwhile. uvloop does not
show its steps; asyncio's own loop does, and runs the same code of ours. What counts is the CPU time of the loop's
thread: waiting for a core is the machine's.
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

FILE = "steps.json"
LONG_S = 0.001
FIRST = "Job.start"
"""the callback that begins the first job: what comes before is start-up"""


class Steps:
    def __init__(self) -> None:
        self.cpu_s = array("d")
        """each step's, without the collector's"""
        self.collections_s = array("d")
        self._collected_s = self._collecting_since = 0.0
        self._long = Counter[str]()
        self._begun = False

    def watch(self) -> None:
        """Every loop that is made from now on; when the process ends, FILE in its directory says what was seen."""
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
        if threading.current_thread() is threading.main_thread():  # Celery's: the loop runs in another
            return
        if phase == "start":
            self._collecting_since = time.thread_time()
            return
        spent_s = time.thread_time() - self._collecting_since
        self._collected_s += spent_s
        if self._begun:
            self.collections_s.append(spent_s)

    def _write(self) -> None:
        seen = {"cpu_s": list(self.cpu_s), "collections_s": list(self.collections_s), "long": dict(self._long)}
        Path(FILE).write_text(json.dumps(seen))


def _name(callback: Any) -> str:
    """Of what runs: a task by its coroutine and where in it the step begins."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return getattr(callback, "__qualname__", type(callback).__name__)
    coroutine: Any = task.get_coro()
    names = [coroutine.__qualname__]
    while (coroutine := getattr(coroutine, "cr_await", None)) is not None and hasattr(coroutine, "__qualname__"):
        names.append(coroutine.__qualname__)
    return names[0] if len(names) == 1 else f"{names[0]} > {names[-1]}"
