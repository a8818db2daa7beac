"""CPU time of named functions of a rollout worker, of its threads, and of the kernel on their behalf.

Functions are timed with the clock of their thread, coroutines from one await to the next. A function's time excludes
that of the named functions it calls. Measured from when the first of several rollouts begins until the last has ended.
"""

import functools
import gc
import importlib
import inspect
import json
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from bench.harness.procfs import TICKS_A_SECOND

FILE = "sections.json"
GARBAGE = "garbage collection"
EXECUTE = "headpond.tasks.execution:AsyncExecutor.execute"
SECTIONS = {
    "start: task, lease and reply": EXECUTE,
    "start: pydantic and the message": "headpond.workers.delivery:Delivery._run",
    "start: files of a session": "headpond.recording.spool:Spool.create",
    "start: session": "headpond.recording.session:Session.start",
    "turn: policy": "headpond.playing.policy:RecordedPolicy.chat",
    "turn: match the conversation": "headpond.recording.session:Session.prepare",
    "turn: encode the request": "headpond.engines.dialects.base:Dialect.request_body",
    "turn: choose and retry": "headpond.engines.http.client:EngineClient.send",
    "turn: aiohttp, request": "aiohttp.client:ClientSession._request",
    "turn: aiohttp, head": "aiohttp.client_proto:ResponseHandler.data_received",
    "turn: receive": "headpond.engines.http.receiver:Receiver.receive",
    "turn: hand over to threads": "headpond.event_loop.offload:Pool.run",
    "turn: hand over to file threads": "headpond.event_loop.offload:FilePool.run",
    "turn: hand over, in a file thread": "headpond.event_loop.offload:FilePool._run_waiting",
    "turn: read, cut": "headpond.engines.responses.response:find_cuts",
    "turn: read, decode the rest": "headpond.engines.responses.response:_response",
    "turn: read, routed experts": "headpond.engines.responses.response:_routes",
    "turn: read, other": "headpond.engines.http.client:_read_chunks",
    "turn: record, loop": "headpond.recording.session:Session._record",
    "turn: record, rows": "headpond.store.parts:Part.append",
    "turn: record, log": "headpond.recording.spool:Spool.write",
    "end: seal, loop": "headpond.recording.session:Session._seal",
    "end: seal, columns": "headpond.recording.spool:write_columns",
    "end: seal, experts": "headpond.recording.spool:seal_experts",
    "end: seal, other": "headpond.recording.spool:Spool.seal",
    "end: encode the reply": "headpond.tasks.execution:Execution.done",
    "start and end: write to Redis": "headpond.tasks.execution:Outbox._send",
}
THREADS = {"asyncio-pool": "loop", "headpond-cpu": "CPU threads", "headpond-files": "file threads"}
OTHERS, CELERY = "other threads", "Celery's thread"


class SectionTimer:
    def __init__(self) -> None:
        self._local = threading.local()
        self._cpu_s: dict[str, float] = defaultdict(float)
        self._begin: dict[str, Any] = {}
        self._running = self._rollouts = 0

    def install(self) -> None:
        """Write FILE to the working directory whenever the last running rollout has ended."""
        for name, place in SECTIONS.items():
            module, _, path = place.partition(":")
            *owners, attribute = path.split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            function = inspect.getattr_static(owner, attribute)
            timed = self._counted if place == EXECUTE else self._timed
            if isinstance(function, classmethod):
                setattr(owner, attribute, classmethod(timed(name, function.__func__)))
            else:
                setattr(owner, attribute, timed(name, function))
        gc.callbacks.append(self._collector)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            async def run(*args: Any, **options: Any) -> Any:
                return await self._driven(name, function(*args, **options))

            return functools.wraps(function)(run)

        def call(*args: Any, **options: Any) -> Any:
            self._enter()
            try:
                return function(*args, **options)
            finally:
                self._leave(name)

        return functools.wraps(function)(call)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        execute = self._timed(name, function)

        async def run(*args: Any) -> None:
            if not self._running:
                self._begin = {"threads": threads(), "sections": dict(self._cpu_s)}
                self._rollouts = 0
            self._running += 1
            try:
                await execute(*args)
            finally:
                self._running -= 1
                self._rollouts += 1
                if not self._running:
                    self._write()

        return run

    @types.coroutine
    def _driven(self, name: str, coroutine: Any) -> Generator[Any, Any, Any]:
        value, error = None, None
        while True:
            self._enter()
            try:
                awaited = coroutine.send(value) if error is None else coroutine.throw(error)
            except StopIteration as stop:
                return stop.value
            finally:
                self._leave(name)
            try:
                value, error = (yield awaited), None
            except BaseException as thrown:  # noqa: BLE001  passed on to the coroutine
                error = thrown

    def _enter(self) -> None:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        self._local.stack.append([time.thread_time(), 0.0])

    def _leave(self, name: str) -> None:
        stack = self._local.stack
        began_s, inner_s = stack.pop()
        spent_s = time.thread_time() - began_s
        self._cpu_s[name] += spent_s - inner_s  # may lose an addition of another thread: one in thousands
        if stack:
            stack[-1][1] += spent_s

    def _collector(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._enter()
        else:
            self._leave(GARBAGE)

    def _write(self) -> None:
        before, now = self._begin, threads()
        sections = {name: spent - before["sections"].get(name, 0.0) for name, spent in self._cpu_s.items()}
        kinds = {
            kind: [after - since for after, since in zip(values, before["threads"].get(kind, (0, 0, 0)), strict=True)]
            for kind, values in now.items()
        }
        temporary = Path(f"{FILE}.new")
        temporary.write_text(json.dumps({"rollouts": self._rollouts, "sections": sections, "threads": kinds}))
        temporary.rename(FILE)


def threads() -> dict[str, tuple[float, float, float]]:
    """CPU, user and kernel seconds so far, by kind of thread. The kernel samples the latter two."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    main, sums = str(threading.main_thread().native_id), defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0])
    for task in Path("/proc/self/task").iterdir():
        kind = CELERY if task.name == main else THREADS.get(names.get(task.name, "").partition("_")[0], OTHERS)
        user, kernel = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
        ran_ns = (task / "schedstat").read_text().split()[0]
        for index, value in enumerate((int(ran_ns) / 1e9, int(user) / TICKS_A_SECOND, int(kernel) / TICKS_A_SECOND)):
            sums[kind][index] += value
    return {kind: (values[0], values[1], values[2]) for kind, values in sums.items()}
