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

from headpond.event_loop import factory

FILE = "steps.json"
LONG_S = 0.001


class StepTimer:
    def __init__(self, first: str) -> None:
        """`first`: name of the first callback that counts; steps before it are start-up."""
        self._first = first
        self._thread = 0
        self.cpu_s = array("d")
        """of each step, garbage collection excluded"""
        self.collections_s = array("d")
        self._collected_s = self._collecting_since = 0.0
        self._long = Counter[str]()
        self._longest_s: dict[str, float] = {}
        self._begun = False

    def install(self) -> None:
        """Time every loop created from now on, and write FILE to the working directory when the process exits."""
        run = asyncio.Handle._run  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]

        def timed(handle: Any) -> None:
            names = _names(handle._callback)
            self._begun |= names[0] == self._first
            self._thread = threading.get_ident()
            before_s, collected_s = time.thread_time(), self._collected_s
            run(handle)
            cpu_s = time.thread_time() - before_s - (self._collected_s - collected_s)
            if self._begun:
                self.cpu_s.append(cpu_s)
                if cpu_s > LONG_S:
                    self._note(cpu_s, names, _names(handle._callback))

        asyncio.Handle._run = timed  # pyright: ignore[reportAttributeAccessIssue]
        factory._fastest_loop = lambda: asyncio.SelectorEventLoop  # pyright: ignore[reportPrivateUsage]
        gc.callbacks.append(self._collector)
        atexit.register(self._write)

    def _note(self, cpu_s: float, begun: list[str], ended: list[str]) -> None:
        """Named by the task's coroutine, and the innermost ones in which the step began and ended."""
        name = begun[0] if len(begun) == len(ended) == 1 else f"{begun[0]}: {begun[-1]} > {ended[-1]}"
        self._long[name] += 1
        self._longest_s[name] = max(cpu_s, self._longest_s.get(name, 0.0))

    def _collector(self, phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting_since = time.thread_time()
            return
        spent_s = time.thread_time() - self._collecting_since
        self._collected_s += spent_s
        if self._begun:
            self.collections_s.append(spent_s)

    def _write(self) -> None:
        timings = {
            "cpu_s": list(self.cpu_s),
            "collections_s": list(self.collections_s),
            "long": dict(self._long),
            "longest_s": self._longest_s,
        }
        Path(FILE).write_text(json.dumps(timings))


def _names(callback: Any) -> list[str]:
    """Name of a callback; for a task, of its coroutine and those that it awaits at present."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return [getattr(callback, "__qualname__", type(callback).__name__)]
    coroutine: Any = task.get_coro()
    names = [coroutine.__qualname__]
    while (coroutine := getattr(coroutine, "cr_await", None)) is not None and hasattr(coroutine, "__qualname__"):
        names.append(coroutine.__qualname__)
    return names
