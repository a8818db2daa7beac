"""The worker's handle on the child process of a `verifiers` environment (`verifiers_child.py`).

The worker itself must not import the package. The import would hold the GIL for seconds. One
computing reward would block the loop of all rollouts. Agents' programs would inherit the
worker's secrets. The package's graders need the main thread and would score 0. The child ends
when its socket closes, even if the worker was killed.
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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from headpond.environments.protocol import AgentPolicy
from headpond.environments.verifiers.wire import (
    HANG_TIMEOUT_S,
    MAX_LINE_BYTES,
    SHUTDOWN_TIMEOUT_S,
    CancelRequest,
    EpisodeRequest,
    EpisodeResult,
    LoadFailure,
    Outcome,
    Ready,
    Settings,
    child_message_decoder,
    encode_line,
)
from headpond.errors import ConfigError
from headpond.event_loop.cancellation import run_to_completion
from headpond.event_loop.offload import in_io_thread
from headpond.processes.privacy import inherited_variables

START_TIMEOUT_S = 600.0  # The package takes 5-15 s; a taskset may read a large data set.
# A cancelled rollout waits this long for the removal of its sandbox, well within GRACE_S. The child
# then continues alone.
CANCEL_TIMEOUT_S = 10.0
# HANG_TIMEOUT_S is split into this many waits, and all must time out. A worker that was suspended
# finds its clock far ahead: one timeout means nothing.
HANG_CHECKS = 20
SEE_STDERR = "see this process's stderr for its last output"
REMOVED = " (deleted)"  # The kernel's mark on a directory that was removed.


class Connection(NamedTuple):
    writer: asyncio.StreamWriter
    reading: "asyncio.Task[None]"


class VerifiersProcess:
    """A child process, created in a thread, because creation waits until the package is loaded.
    Used on one loop. Raises ConfigError if the environment cannot be loaded."""

    def __init__(self, settings: Settings) -> None:
        directory = tempfile.mkdtemp(prefix="headpond-verifiers-")
        self._socket, child_socket = socket.socketpair()
        with child_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.verifiers_child", str(child_socket.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # Environments print.
                pass_fds=[child_socket.fileno()],
                env=inherited_variables(),
                process_group=0,
            )
        self._shut_down = weakref.finalize(self, _shut_down, self._socket, self._process, directory)
        # The socket closes with this process, and no thread can be started then.
        self._shut_down.atexit = False
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[EpisodeResult]] = {}
        self._connecting: asyncio.Task[Connection] | None = None
        self._cleanup: threading.Thread | None = None
        self.examples = self._load(msgspec.structs.replace(settings, directory=directory))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._shut_down.alive and self._process.poll() is None

    async def play(self, example: int, policy: AgentPolicy) -> EpisodeResult:
        """Play one episode. A cancelled call returns after the episode has been cleaned up."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        writer, reading = await asyncio.shield(self._connecting)
        number = next(self._numbers)
        if reading.done():
            return _process_failure(number, "died")
        pending = self._pending[number] = asyncio.get_running_loop().create_future()
        url, key = policy.base_url, policy.api_key
        request = EpisodeRequest(number=number, example=example, base_url=url, api_key=key, model=policy.model)
        try:
            writer.write(encode_line(request))
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            writer.write(encode_line(CancelRequest(number=number)))
            await run_to_completion(asyncio.create_task(asyncio.wait([pending], timeout=CANCEL_TIMEOUT_S)))
            raise
        finally:
            del self._pending[number]

    async def close(self) -> None:
        """Cancel unfinished episodes and end the process."""
        if self._connecting is None:
            self._cleanup = self._shut_down()
            self._socket.close()
        else:
            _, reading = await self._connecting
            reading.cancel()
            await asyncio.wait([reading])
        if self._cleanup is not None:
            await in_io_thread(self._cleanup.join)

    def _load(self, settings: Settings) -> int:
        """Send the settings, wait until the environment is loaded, and return its number of
        examples."""
        self._socket.settimeout(START_TIMEOUT_S)
        try:
            self._socket.sendall(encode_line(settings))
            response = child_message_decoder.decode(self._first_line())
            if not isinstance(response, Ready):
                assert isinstance(response, LoadFailure)
                raise ConfigError(response.reason)
        except TimeoutError:
            self._shut_down()
            raise ConfigError(f"it was not loaded within {START_TIMEOUT_S:g} s") from None
        except BaseException:
            self._shut_down()
            raise
        return response.examples

    def _first_line(self) -> bytes:
        """Read byte by byte: the loop's reader gets everything after this line."""
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = self._socket.recv(1)
            if not byte:
                raise ConfigError(f"its process died during loading; {SEE_STDERR}")
            line += byte
        return bytes(line)

    async def _connect(self) -> Connection:
        reader, writer = await asyncio.open_unix_connection(sock=self._socket, limit=MAX_LINE_BYTES)
        return Connection(writer, asyncio.create_task(self._read(reader, writer)))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reason = "was closed"
        try:
            reason = await self._read_messages(reader)
        finally:
            writer.close()
            self._cleanup = self._shut_down()
            for number, pending in self._pending.items():
                if not pending.done():
                    pending.set_result(_process_failure(number, reason))

    async def _read_messages(self, reader: asyncio.StreamReader) -> str:
        """Read until the process dies or hangs, and return which."""
        timeouts = 0
        while timeouts < HANG_CHECKS:
            try:
                async with asyncio.timeout(HANG_TIMEOUT_S / HANG_CHECKS):
                    line = await reader.readline()
            except TimeoutError:
                timeouts += 1
                continue
            except OSError:
                return "died"
            if not line:
                return "died"
            timeouts = 0
            self._handle(line)
        return f"hung: no heartbeat for {HANG_TIMEOUT_S:g} s. Check for a reward function that never returns"

    def _handle(self, line: bytes) -> None:
        message = child_message_decoder.decode(line)
        if isinstance(message, EpisodeResult):
            pending = self._pending.get(message.number)
            if pending is not None and not pending.done():
                pending.set_result(message)


def _process_failure(number: int, reason: str) -> EpisodeResult:
    reason = f"the environment's process {reason}; {SEE_STDERR}"
    return EpisodeResult(number=number, outcome=Outcome.INFRASTRUCTURE, reason=reason)


def _shut_down(connection: socket.socket, process: "subprocess.Popen[bytes]", directory: str) -> threading.Thread:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    thread = threading.Thread(target=_clean_up, args=(process, directory), daemon=True)
    thread.start()
    return thread


def _clean_up(process: "subprocess.Popen[bytes]", directory: str) -> None:
    """Wait for the process, which removes its sandboxes. A killed or crashed process leaves
    programs and files: remove them."""
    try:
        process.wait(SHUTDOWN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    kill_programs_in(directory)
    shutil.rmtree(directory, ignore_errors=True)


def kill_programs_in(directory: str) -> None:
    """Kill all programs in a directory whose episodes have ended."""
    _kill(lambda workdir: Path(workdir).is_relative_to(directory))


def kill_programs_of_ended_episodes(directory: str) -> None:
    """Kill the programs in removed working directories: the package removes an episode's
    directory at its end."""
    _kill(lambda workdir: workdir.endswith(REMOVED) and Path(workdir).is_relative_to(directory))


def _kill(is_left_behind: Callable[[str], bool]) -> None:
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # The process has ended, or belongs to another user.
            if is_left_behind(str(link.readlink())):
                os.kill(int(link.parent.name), signal.SIGKILL)
