"""A child process in its own process group, its output in a file. It ends with its parent."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from headpond.errors import RunError
from headpond.processes.child_programs import GUARD, LAUNCHER, MARK, kill_marked
from headpond.processes.privacy import inherited_variables

T = TypeVar("T")
BIN = Path(sys.executable).parent
POLL_S = 0.02
TAIL_BYTES = 4096
LISTENING = re.compile(r"url=http://127\.0\.0\.1:(\d+)")
LISTEN_S = 60.0  # for a server on a busy machine


class ChildProcess:
    """Must be started from the main thread: the kernel kills the process when the thread that started it ends."""

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        directory: Path | None,
        variables: Mapping[str, str],
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        append: bool = False,
    ) -> None:
        """The log is `directory/NAME.log`; without a directory, the output is this process's. `environment`: default is
        this process's without HEADPOND_*."""
        self.name = name
        self.log = directory / f"{name}.log" if directory else Path(os.devnull)
        launched = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), program(command[0]), *command[1:]]
        inherited = inherited_variables() if environment is None else environment
        self.mark = uuid.uuid4().hex
        marks = {MARK: f"{self.mark} {inherited.get(MARK, '')}".strip()}  # those of the processes above it too
        with self.log.open("ab" if append else "wb") as log:
            self.log_start = log.tell()
            """where this process's output begins"""
            self._popen = subprocess.Popen(
                launched,
                cwd=cwd or directory,
                env={**inherited, **variables, **marks},
                stdin=subprocess.DEVNULL,
                stdout=log if directory else None,
                stderr=subprocess.STDOUT if directory else None,
                process_group=0,  # not a new session: the kernel first divides the cores between sessions
            )
        self.pid = self._popen.pid

    @property
    def ended(self) -> bool:
        return self.exit_code is not None

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal. Does not reap the process, so that its CPU time can still be read."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    @property
    def how_it_ended(self) -> str:
        code = self.exit_code or 0
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    @property
    def output(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")

    @property
    def output_tail(self) -> str:
        """The end of the output, from the beginning of a line; cheap, however long the log is."""
        with self.log.open("rb") as log:
            begin = max(self.log_start, log.seek(0, os.SEEK_END) - TAIL_BYTES)
            log.seek(begin)
            text = log.read().decode(errors="replace")
        return text if begin == self.log_start else text.partition("\n")[2]

    def wait_until(self, done: Callable[[], T], *, what: str, timeout_s: float) -> T:
        """Poll `done` until it returns a true value, and return that. Raise `RunError` if the process ends first."""
        deadline = time.monotonic() + timeout_s
        while not (value := done()):
            if self.ended and not (value := done()):
                raise RunError(f"{self.name} ended before {what}. The end of its log:\n{self.output_tail}")
            if time.monotonic() > deadline:
                raise RunError(
                    f"waited {timeout_s:g} s until {what}. The end of the log of {self.name}:\n{self.output_tail}"
                )
            time.sleep(POLL_S)
        return value

    def signal(self, signum: signal.Signals) -> None:
        """To the process only: it ends its own children."""
        if self._popen.returncode is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process and everything it started, and reap it."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it died before it had the group, or has left it
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.kill()
            self._popen.wait()
            kill_marked(self.mark)


def program(name: str) -> str:
    """Path of a command: installed beside this interpreter, or found on PATH."""
    beside = BIN / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RunError(f"the program {name!r} was not found: install it, or write its path")
    return found


class Guard:
    """A child that kills the named processes and what they started when this process ends, also by SIGKILL, and then
    removes a temporary directory for what they leave."""

    def __init__(self) -> None:
        # Not in the run directory: names of unix sockets below it may have 108 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="headpond-"))
        command = [sys.executable, "-I", "-S", "-c", GUARD, str(self.directory)]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0, text=True)

    def add(self, process: ChildProcess) -> None:
        self._write(f"+{process.pid} {process.mark}")

    def remove(self, process: ChildProcess) -> None:
        """Call it when its group is gone: the number may be given to another process."""
        self._write(f"-{process.pid} {process.mark}")

    def close(self) -> None:
        """Kill what is left of the groups."""
        self._popen.communicate()

    def _write(self, line: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{line}\n")
        self._popen.stdin.flush()


def listening_port(process: ChildProcess) -> int:
    """Wait until a server has logged its URL. Return its port."""
    match = process.wait_until(lambda: LISTENING.search(process.output), what="it is listening", timeout_s=LISTEN_S)
    assert match is not None
    return int(match[1])
