"""A `verifiers` environment in a process of its own: `served.py` is the other end of its line.

In the worker itself, importing the package would hold the GIL for seconds, one reward that computes would stop the loop
of all rollouts, the programs of agents would inherit the worker's secrets, and the package's graders would score 0:
they need a main thread. The process ends when its line does, so with its worker too.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.environments.agent_program import inherited_variables
from penstock.environments.protocol import AgentPolicy
from penstock.environments.verifiers.wire import (
    END_S,
    LINE_BYTES,
    SAID,
    SILENCE_S,
    Answer,
    Ask,
    Cancel,
    Kind,
    Ready,
    Refused,
    Settings,
    line,
)
from penstock.errors import ConfigError
from penstock.runtime.cancellation import run_to_completion
from penstock.runtime.offload import in_io_thread

START_S = 600.0  # the package takes 5-15 s; a taskset may read a large data set
# Who is cancelled waits so long for its sandbox to be gone, well within GRACE_S; the process then cleans up behind it.
CANCEL_S = 10.0
# A worker that was itself suspended finds its clock far ahead: silence counts when it comes so many times in a row.
SILENT_TIMES = 20
LAST_WORDS = "its last words are in this process's stderr"


class Line(NamedTuple):
    writer: asyncio.StreamWriter
    reading: "asyncio.Task[None]"


class VerifiersProcess:
    """Made in a thread, since it waits for the package to be loaded; used on one loop. ConfigError says what is wrong
    with the environment."""

    def __init__(self, settings: Settings) -> None:
        directory = tempfile.mkdtemp(prefix="penstock-verifiers-")
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.verifiers_child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what an environment prints
                pass_fds=[theirs.fileno()],
                env=inherited_variables(),
                process_group=0,
            )
        self._end = weakref.finalize(self, _end, self._socket, self._process, directory)
        self._end.atexit = False  # the line ends with us, and no thread can be started then
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._attaching: asyncio.Task[Line] | None = None
        self._ending: threading.Thread | None = None
        self.examples = self._started(msgspec.structs.replace(settings, directory=directory))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_living(self) -> bool:
        return self._end.alive and self._process.poll() is None

    async def play(self, example: int, policy: AgentPolicy) -> Answer:
        """Cancelled, it returns when nothing of the episode is left."""
        if self._attaching is None:
            self._attaching = asyncio.create_task(self._attached())
        writer, reading = await asyncio.shield(self._attaching)
        number = next(self._numbers)
        if reading.done():
            return _gone(number, "died")
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        url, key = policy.base_url, policy.api_key
        try:
            writer.write(line(Ask(number=number, example=example, base_url=url, api_key=key, model=policy.model)))
            return await asyncio.shield(answered)
        except asyncio.CancelledError:
            writer.write(line(Cancel(number=number)))
            await run_to_completion(asyncio.create_task(_settled(answered)))
            raise
        finally:
            del self._waiting[number]

    async def close(self) -> None:
        """What is still played is cancelled."""
        if self._attaching is None:
            self._ending = self._end()
            self._socket.close()
        else:
            _, reading = await self._attaching
            reading.cancel()
            await asyncio.wait([reading])
        if self._ending is not None:
            await in_io_thread(self._ending.join)

    def _started(self, settings: Settings) -> int:
        self._socket.settimeout(START_S)
        try:
            self._socket.sendall(line(settings))
            said = SAID.decode(self._first_line())
            if not isinstance(said, Ready):
                assert isinstance(said, Refused)
                raise ConfigError(said.why)
        except TimeoutError:
            self._end()
            raise ConfigError(f"it was not loaded within {START_S:g} s") from None
        except BaseException:
            self._end()
            raise
        return said.examples

    def _first_line(self) -> bytes:
        """Byte by byte: what follows is for the loop."""
        found = bytearray()
        while not found.endswith(b"\n"):
            byte = self._socket.recv(1)
            if not byte:
                raise ConfigError(f"its process died while it was loaded; {LAST_WORDS}")
            found += byte
        return bytes(found)

    async def _attached(self) -> Line:
        reader, writer = await asyncio.open_unix_connection(sock=self._socket, limit=LINE_BYTES)
        return Line(writer, asyncio.create_task(self._read(reader, writer)))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        why = "was ended"
        try:
            why = await self._heard(reader)
        finally:
            writer.close()
            self._ending = self._end()
            for number, answered in self._waiting.items():
                if not answered.done():
                    answered.set_result(_gone(number, why))

    async def _heard(self, reader: asyncio.StreamReader) -> str:
        """Until there is nothing more to hear: why."""
        silent = 0
        while silent < SILENT_TIMES:
            try:
                async with asyncio.timeout(SILENCE_S / SILENT_TIMES):
                    said = await reader.readline()
            except TimeoutError:
                silent += 1
                continue
            except OSError:
                return "died"
            if not said:
                return "died"
            silent = 0
            self._heed(said)
        return f"hung: its loop did not turn for {SILENCE_S:g} s, is there a reward that never returns?"

    def _heed(self, said: bytes) -> None:
        message = SAID.decode(said)
        if isinstance(message, Answer):
            answered = self._waiting.get(message.number)
            if answered is not None and not answered.done():
                answered.set_result(message)


async def _settled(answered: "asyncio.Future[Answer]") -> None:
    await asyncio.wait([answered], timeout=CANCEL_S)


def _gone(number: int, why: str) -> Answer:
    return Answer(number=number, kind=Kind.INFRASTRUCTURE, why=f"the environment's process {why}; {LAST_WORDS}")


def _end(connection: socket.socket, process: "subprocess.Popen[bytes]", directory: str) -> threading.Thread:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    thread = threading.Thread(target=_bury, args=(process, directory), daemon=True)
    thread.start()
    return thread


def _bury(process: "subprocess.Popen[bytes]", directory: str) -> None:
    """It puts its sandboxes away and ends. Where it was killed or crashed, its programs and their files are left."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in _working_in(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


def _working_in(directory: str) -> Iterator[int]:
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.readlink().is_relative_to(directory):
                yield int(link.parent.name)
