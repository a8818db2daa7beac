"""An idle event loop in a process of its own: what the machine itself does to any loop while a benchmark runs.

It samples as the measured loop does. Its process answers on stdout, and ends when its stdin does.
"""

import asyncio
import json
import subprocess
import sys
from types import TracebackType
from typing import Self

from penstock.runtime.event_loop import event_loop_factory
from penstock.runtime.loop_lag import LagSummary, LoopLag

INTERVAL_S = 0.005
"""200 Hz: of both loops that are compared"""
WINDOW_S = 3600.0  # longer than any measurement: a summary covers all of one
BEGIN, END = "begin", "end"


class Canary:
    """`with Canary() as canary: canary.begin(); ...; lag = canary.end()`"""

    def __enter__(self) -> Self:
        # In a process group of its own: Ctrl-C is for the benchmark, whose end then ends it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.canary"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self._ask(END)  # it answers: it has started
        self.pid = self._process.pid
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate()

    def begin(self) -> None:
        self._ask(BEGIN)

    def end(self) -> LagSummary:
        """The lag since `begin`."""
        return LagSummary.from_dict(json.loads(self._ask(END)))

    def _ask(self, question: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


async def _answer_until_eof() -> None:
    loop = asyncio.get_running_loop()
    questions = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    lag = LoopLag(process="canary", interval_s=INTERVAL_S, window_s=WINDOW_S)
    sampling: asyncio.Task[None] | None = None
    async for question in questions:
        if question.decode().strip() == BEGIN:
            lag = LoopLag(process="canary", interval_s=INTERVAL_S, window_s=WINDOW_S)
            sampling = asyncio.create_task(lag.run())
        elif sampling is not None:
            sampling.cancel()
        sys.stdout.write(json.dumps(lag.summary().as_dict()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_answer_until_eof())
