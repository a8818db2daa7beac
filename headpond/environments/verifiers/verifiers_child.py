"""The child process of a `verifiers` environment: loads it, plays requested episodes, ends when its
socket closes.

The loop runs in the main thread: the package's graders use signals for their timeouts and score
0 in other threads.
"""

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from headpond.environments.verifiers.player import Player
from headpond.environments.verifiers.wire import (
    HANG_TIMEOUT_S,
    HEARTBEAT_INTERVAL_S,
    MAX_LINE_BYTES,
    MAX_REASON_CHARACTERS,
    SHUTDOWN_TIMEOUT_S,
    CancelRequest,
    EpisodeRequest,
    EpisodeResult,
    Heartbeat,
    LoadFailure,
    Outcome,
    Ready,
    encode_line,
    settings_decoder,
    worker_message_decoder,
)
from headpond.errors import ConfigError, HeadpondError, error_boundary
from headpond.event_loop.factory import event_loop_factory
from headpond.event_loop.loop_lag import LagTrace, LoopLag

# The worker's log names a reward that blocks the loop for longer.
BLOCKED_S = 1.0


class EpisodeServer:
    def __init__(self, player: Player, reader: asyncio.StreamReader, send: Callable[[msgspec.Struct], None]) -> None:
        self._player = player
        self._reader = reader
        self._send = send
        self._playing: dict[int, asyncio.Task[EpisodeResult]] = {}

    async def serve(self) -> None:
        lag = LoopLag(process="verifiers", trace=LagTrace(BLOCKED_S))
        background = [asyncio.create_task(lag.run()), asyncio.create_task(self._send_heartbeats())]
        try:
            with contextlib.suppress(ConnectionError):  # The worker was killed.
                while line := await self._reader.readline():
                    self._handle(worker_message_decoder.decode(line))
        finally:
            # The kernel enforces the timeout: threads may never end, and environments may ignore
            # cancellation.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, SHUTDOWN_TIMEOUT_S)
            tasks = [*background, *self._playing.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _handle(self, request: EpisodeRequest | CancelRequest) -> None:
        if isinstance(request, EpisodeRequest):
            task = self._playing[request.number] = asyncio.create_task(self._play(request))
            task.add_done_callback(lambda done: self._send_result(request.number, done))
        elif playing := self._playing.get(request.number):
            playing.cancel()

    async def _play(self, request: EpisodeRequest) -> EpisodeResult:
        try:
            with error_boundary(ConfigError, "the package raised"):
                return await self._player.play(request)
        except HeadpondError as error:
            return EpisodeResult(number=request.number, outcome=Outcome.ENVIRONMENT, reason=str(error))

    def _send_result(self, number: int, task: "asyncio.Task[EpisodeResult]") -> None:
        del self._playing[number]
        cancelled = EpisodeResult(number=number, outcome=Outcome.CANCELLED, reason="the environment cancelled it")
        result = cancelled if task.cancelled() else task.result()
        self._send(msgspec.structs.replace(result, reason=result.reason[:MAX_REASON_CHARACTERS]))

    async def _send_heartbeats(self) -> None:
        while True:
            # The kernel kills a process that computes for this long without a heartbeat, even if C code holds the GIL.
            signal.setitimer(signal.ITIMER_VIRTUAL, HANG_TIMEOUT_S)
            self._send(Heartbeat())
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)


async def serve(player: Player, connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE_BYTES)

    def send(message: msgspec.Struct) -> None:
        if not writer.is_closing():
            writer.write(encode_line(message))

    async with contextlib.AsyncExitStack() as stack:
        try:
            with error_boundary(ConfigError, "it cannot be started"):
                await stack.enter_async_context(player.serving())
        except HeadpondError as error:
            send(LoadFailure(reason=str(error)))
            await writer.drain()
            return
        send(Ready(examples=len(player.tasks)))
        await EpisodeServer(player, reader, send).serve()


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    connection = socket.socket(fileno=int(sys.argv[1]))
    # A program that outlives this process must not hold the socket open.
    connection.set_inheritable(False)
    with connection.makefile("rb") as lines:
        settings = settings_decoder.decode(lines.readline())
    try:
        with error_boundary(ConfigError, "it cannot be loaded"):
            player = Player(settings)
    except HeadpondError as error:
        connection.sendall(encode_line(LoadFailure(reason=str(error))))
        return
    try:
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(serve(player, connection))
    finally:
        if settings.directory:  # The worker removes it too, unless the worker was killed.
            shutil.rmtree(settings.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
