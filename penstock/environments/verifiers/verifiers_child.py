"""The process of a `verifiers` environment: loads it, plays what it is asked for, and ends when its line does.

The loop runs in the main thread, because the package's graders keep their time with signals: elsewhere they score 0.
"""

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.environments.error_boundary import error_boundary
from penstock.environments.verifiers.player import Player
from penstock.environments.verifiers.wire import (
    ASKED,
    BEAT_S,
    END_S,
    LINE_BYTES,
    SETTINGS,
    SILENCE_S,
    WHY_CHARACTERS,
    Answer,
    Ask,
    Beat,
    Kind,
    Ready,
    Refused,
    line,
)
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.event_loop import event_loop_factory
from penstock.runtime.loop_lag import LagTrace, LoopLag

# A reward that computes for longer on the loop is named in the worker's log.
BLOCKED_S = 1.0


class Served:
    def __init__(self, player: Player, reader: asyncio.StreamReader, say: Callable[[msgspec.Struct], None]) -> None:
        self._player = player
        self._reader = reader
        self._say = say
        self._playing: dict[int, asyncio.Task[Answer]] = {}

    async def serve(self) -> None:
        lag = LoopLag(process="verifiers", trace=LagTrace(BLOCKED_S))
        watching = [asyncio.create_task(lag.run()), asyncio.create_task(self._beat())]
        try:
            with contextlib.suppress(ConnectionError):  # a worker that was killed
                while asked := await self._reader.readline():
                    self._heed(ASKED.decode(asked))
        finally:
            # By the kernel, too: threads that never end, or an environment that heeds no cancellation, end here.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, END_S)
            left = [*watching, *self._playing.values()]
            for task in left:
                task.cancel()
            await asyncio.wait(left)

    def _heed(self, asked: Any) -> None:
        if isinstance(asked, Ask):
            task = self._playing[asked.number] = asyncio.create_task(self._play(asked))
            task.add_done_callback(lambda done: self._done(asked.number, done))
        elif playing := self._playing.get(asked.number):
            playing.cancel()

    async def _play(self, asked: Ask) -> Answer:
        try:
            with error_boundary(ConfigError, "the package raised"):
                return await self._player.play(asked)
        except PenstockError as error:
            return Answer(number=asked.number, kind=Kind.ENVIRONMENT, why=str(error))

    def _done(self, number: int, task: "asyncio.Task[Answer]") -> None:
        del self._playing[number]
        stopped = Answer(number=number, kind=Kind.CANCELLED, why="the episode was cancelled, not by its worker")
        answer = stopped if task.cancelled() else task.result()
        self._say(msgspec.structs.replace(answer, why=answer.why[:WHY_CHARACTERS]))

    async def _beat(self) -> None:
        while True:
            # The kernel ends a process that computes for so long without coming by here, whoever holds the interpreter.
            signal.setitimer(signal.ITIMER_VIRTUAL, SILENCE_S)
            self._say(Beat())
            await asyncio.sleep(BEAT_S)


async def serve(player: Player, connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=LINE_BYTES)

    def say(message: msgspec.Struct) -> None:
        if not writer.is_closing():
            writer.write(line(message))

    async with contextlib.AsyncExitStack() as stack:
        try:
            with error_boundary(ConfigError, "it cannot be served"):
                await stack.enter_async_context(player.serving())
        except PenstockError as error:
            say(Refused(why=str(error)))
            await writer.drain()
            return
        say(Ready(examples=len(player.tasks)))
        await Served(player, reader, say).serve()


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # a program that outlives this process must not keep its line open
    with connection.makefile("rb") as lines:
        settings = SETTINGS.decode(lines.readline())
    try:
        with error_boundary(ConfigError, "it cannot be loaded"):
            player = Player(settings)
    except PenstockError as error:
        connection.sendall(line(Refused(why=str(error))))
        return
    try:
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(serve(player, connection))
    finally:
        if settings.directory:  # its worker does it, too, if it lives
            shutil.rmtree(settings.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
