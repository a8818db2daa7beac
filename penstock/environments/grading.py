"""Scoring that may hang or crash, in processes of its own: as many as cores, made when needed, used again.

A caller waits for its turn without a time limit; the limit begins when a grader begins. A grader that is killed takes
nothing along but the answer that it was at.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

from penstock.environments.grader import Call, Grader
from penstock.runtime import offload
from penstock.runtime.cancellation import run_to_completion

Ts = TypeVarTuple("Ts")
R = TypeVar("R")

# Most judges take milliseconds: what takes seconds has been caught by an answer.
TIMEOUT_S = 10.0
# Of one answer. As many as cores may want it at once, beside hundreds of rollouts.
MEMORY_MB = 1024


async def graded(
    judge: Callable[[*Ts], R], *arguments: *Ts, timeout_s: float = TIMEOUT_S, memory_mb: int = MEMORY_MB
) -> R:
    """`judge(*arguments)`, in a process that is killed when it takes longer than `timeout_s`.

    `judge` is a plain function of a module. Arguments are what JSON has; so is what it returns, or a Score without
    columns. PolicyFailure when the answer was too much for it (time, memory, depth, a crash): catch it to score that
    yourself. StageError when it raised anything else: a bug.
    """
    call = Call.of(judge, arguments, timeout_s=timeout_s, memory_mb=memory_mb)
    graders = _graders.get(asyncio.get_running_loop()) or install()
    return await graders.grade(call)


class Graders:
    """Of one loop."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._threads = offload.Pool(name="graders", threads=processes)
        self._turns = asyncio.Semaphore(processes)
        self._idle: list[Grader] = []
        self._busy: set[Grader] = set()

    async def grade(self, call: Call) -> Any:
        async with self._turns:
            grader = self._take()
            working = asyncio.create_task(self._threads.run(grader.grade, call))
            try:
                return await asyncio.shield(working)
            finally:
                try:
                    if not working.done():
                        await run_to_completion(asyncio.create_task(self._stop(grader, working)))
                finally:
                    self._put_back(grader)

    @property
    def pids(self) -> list[int]:
        return [pid for grader in (*self._idle, *self._busy) if (pid := grader.pid) is not None]

    def end(self) -> None:
        """With the loop: in the thread that ends its executor."""
        for grader in list(self._busy):
            grader.stop()
        for grader in self._idle:
            grader.end()
        self._threads.shutdown()

    def _take(self) -> Grader:
        """The one that was used last: those that are not needed are never made."""
        while self._idle:
            grader = self._idle.pop()
            if grader.usable:
                break
            grader.end()  # it was killed from outside while it waited
        else:
            grader = Grader()
        self._busy.add(grader)
        return grader

    def _put_back(self, grader: Grader) -> None:
        self._busy.discard(grader)
        if grader.usable:
            self._idle.append(grader)
        else:
            grader.end()  # mostly it has ended

    async def _stop(self, grader: Grader, working: "asyncio.Task[Any]") -> None:
        grader.stop()
        await asyncio.wait([working])
        await self._threads.run(grader.end)  # where it was just done


_graders: dict[asyncio.AbstractEventLoop, Graders] = {}


def install(processes: int | None = None) -> Graders:
    """Gives the running loop its graders, as many as cores unless told otherwise. They end with the loop."""
    loop = asyncio.get_running_loop()
    graders = _graders[loop] = Graders(processes or offload.cores())

    def end() -> None:
        _graders.pop(loop, None)
        graders.end()

    offload.call_at_shutdown(end)
    return graders
