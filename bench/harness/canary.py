"""An idle event loop in its own process: the lag that the machine causes in any loop while a benchmark runs.

It samples at the rate of the measured loop. The process reads commands from stdin, replies on stdout, and exits at EOF.
"""

import asyncio
import json
import sys
from types import TracebackType
from typing import Self

from bench.harness.processes import LineProcess
from headpond.event_loop.factory import event_loop_factory
from headpond.event_loop.lag_summaries import LagSummary
from headpond.event_loop.loop_lag import LoopLag

INTERVAL_S = 0.005
"""200 Hz, the same for both loops that are compared"""
WINDOW_S = 3600.0  # longer than any measurement, so that a summary covers all of it
BEGIN, END = "begin", "end"


class Canary:
    """`with Canary() as canary: canary.begin(); ...; lag = canary.end()`"""

    def __enter__(self) -> Self:
        self._process = LineProcess("bench.harness.canary")
        self.pid = self._process.pid
        self._request(END)  # returns when the process has started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.close()

    def begin(self) -> None:
        self._request(BEGIN)

    def end(self) -> LagSummary:
        """The lag since `begin`."""
        return LagSummary.from_dict(json.loads(self._request(END)))

    def _request(self, command: str) -> str:
        self._process.send(command)
        return self._process.receive()


async def _serve_commands() -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    lag = LoopLag(process="canary", interval_s=INTERVAL_S, window_s=WINDOW_S)
    sampling: asyncio.Task[None] | None = None
    async for command in commands:
        if command.decode().strip() == BEGIN:
            lag = LoopLag(process="canary", interval_s=INTERVAL_S, window_s=WINDOW_S)
            sampling = asyncio.create_task(lag.run())
        elif sampling is not None:
            sampling.cancel()
        sys.stdout.write(json.dumps(lag.summary().as_dict()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_serve_commands())
