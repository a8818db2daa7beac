"""Processes of a benchmark or a demo: each in its own process group, its output in a file. None outlives its parent."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from penstock.errors import RunError
from penstock.runtime.embedded_redis import LAUNCHER

T = TypeVar("T")
BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
POLL_S = 0.02
TAIL_CHARACTERS = 2000
LISTENING = re.compile(r"url=http://127\.0\.0\.1:(\d+)")
LISTEN_S = 60.0


class Process:
    """Must be started from the main thread: the kernel kills the process when the thread that started it ends."""

    def __init__(self, name: str, command: list[str], *, directory: Path, variables: dict[str, str]) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        program = str(BIN / command[0])
        launched = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), program, *command[1:]]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
        environment = {**inherited, "PYTHONPATH": str(ROOT), **variables}
        with self.log.open("wb") as log:
            self._popen = subprocess.Popen(
                launched,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
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
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def output_tail(self) -> str:
        return self.output[-TAIL_CHARACTERS:]

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

    def terminate(self) -> None:
        """Send SIGTERM to the process only: it ends its own children."""
        if self._popen.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process and everything it started, and reap it."""
        if self._popen.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()


def listening_port(process: Process) -> int:
    """Wait until a server has logged its URL. Returns its port."""
    match = process.wait_until(lambda: LISTENING.search(process.output), what="it is listening", timeout_s=LISTEN_S)
    assert match is not None
    return int(match[1])


class LineProcess:
    """`python -m MODULE`, a child that replies to each line on its stdin with a line on stdout and exits at EOF."""

    def __init__(self, module: str) -> None:
        # In its own process group: Ctrl-C reaches the benchmark only, and the child exits when its stdin closes.
        self._popen = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.pid = self._popen.pid

    def send(self, line: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{line}\n")
        self._popen.stdin.flush()

    def receive(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline()

    def close(self) -> None:
        self._popen.communicate()
