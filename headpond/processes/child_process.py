"""A child process in its own process group, with its output in a file. It ends with its parent."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

from headpond.errors import RunError
from headpond.processes.child_programs import GUARD, LAUNCHER, MARK, kill_marked
from headpond.processes.privacy import inherited_variables

T = TypeVar("T")
BIN = Path(sys.executable).parent
POLL_S = 0.02
TAIL_BYTES = 4096
TAIL_LINES = 15
LISTENING = re.compile(r"url=http://127\.0\.0\.1:(\d+)")
LISTEN_S = 60.0  # A server on a busy machine may take this long.


class ChildProcess:
    """A process that must be started from the main thread. The kernel kills it when the thread
    that started it ends."""

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
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the process. Its log is `directory/NAME.log`; without a directory it shares this
        process's output. `environment` defaults to this process's without HEADPOND_*."""
        self.name = name
        self.log = directory / f"{name}.log" if directory else Path(os.devnull)
        launched = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), program(command[0]), *command[1:]]
        inherited = inherited_variables() if environment is None else environment
        self.mark = uuid.uuid4().hex
        # The child also inherits the marks of the processes above it.
        marks = {MARK: f"{self.mark} {inherited.get(MARK, '')}".strip()}
        with self.log.open("ab" if append else "wb") as log:
            self.log_start = log.tell()  # Where this process's output begins in the log.
            self._popen = subprocess.Popen(
                launched,
                cwd=cwd or directory,
                env={**inherited, **variables, **marks},
                stdin=stdin,
                stdout=log if directory else None,
                stderr=subprocess.STDOUT if directory else None,
                pass_fds=pass_fds,
                # Its own group, which Ctrl-C does not reach. Not a new session: the kernel divides
                # the cores between sessions first.
                process_group=0,
            )
        self.pid = self._popen.pid

    @property
    def ended(self) -> bool:
        return self.exit_code is not None

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal. The process is not reaped: its CPU time
        can still be read."""
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
        """Return the end of the output, from the beginning of a line. Cheap, however long the
        log is."""
        with self.log.open("rb") as log:
            begin = max(self.log_start, log.seek(0, os.SEEK_END) - TAIL_BYTES)
            log.seek(begin)
            text = log.read().decode(errors="replace")
        return text if begin == self.log_start else text.partition("\n")[2]

    @property
    def end_of_log(self) -> str:
        """Return the last lines of the log for a message, below its path."""
        lines = self.output_tail.splitlines()[-TAIL_LINES:] or ["(no output)"]
        return "\n  ".join([f"The end of {self.log}:", *lines])

    def wait_until(self, done: Callable[[], T], *, what: str, timeout_s: float) -> T:
        """Poll `done` until it returns a true value, and return that value. Raise `RunError` if
        the process ends first."""
        deadline = time.monotonic() + timeout_s
        while not (value := done()):
            if self.ended and not (value := done()):
                raise RunError(f"{self.name} ended before {what}. {self.end_of_log}")
            if time.monotonic() > deadline:
                raise RunError(f"waited {timeout_s:g} s until {what}. {self.end_of_log}")
            time.sleep(POLL_S)
        return value

    def signal(self, signum: signal.Signals) -> None:
        """Signal only the process: it ends its own children."""
        if self._popen.returncode is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process and everything it started, and reap it."""
        if self._popen.returncode is None:
            # The process died before it had the group, or has left it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.kill()
            self._popen.wait()
            kill_marked(self.mark)


def program(name: str) -> str:
    """Return the path of a command that is installed beside this interpreter or on PATH."""
    installed = BIN / name
    path = str(installed) if installed.exists() else shutil.which(name)
    if path is None:
        raise RunError(f"the program {name!r} was not found: install it, or write its path")
    return path


class Guard:
    """A child that cleans up when this process ends, even after SIGKILL. It kills the named
    processes and their descendants, then removes a temporary directory."""

    def __init__(self) -> None:
        # Not in the run directory: the path of a unix socket may have at most 108 characters.
        # The TMPDIR of Headpond's processes: a killed worker leaves files there.
        self.directory = Path(tempfile.mkdtemp(prefix="headpond-"))
        command = [sys.executable, "-I", "-S", "-c", GUARD, str(self.directory)]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0, text=True)

    def add(self, process: ChildProcess) -> None:
        self._write(f"+{process.pid} {process.mark}")

    def remove(self, process: ChildProcess) -> None:
        """Stop guarding a process whose group is gone: another process may get its number."""
        self._write(f"-{process.pid} {process.mark}")

    def close(self) -> None:
        """Kill the processes left in the groups."""
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
