"""The processes of a benchmark or a demo: each a process group of its own, its output in a file. None outlives it."""

import os
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
ROOT = Path(__file__).parent.parent
POLL_S = 0.02
LAST_WORDS = 2000  # characters of a log


class Process:
    """Started from the main thread, with whose end the kernel kills it."""

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
                process_group=0,  # not a session: the kernel shares the cores between sessions before it looks at loads
            )
        self.pid = self._popen.pid

    @property
    def ended(self) -> bool:
        return self.exit_code is not None

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal. Looks without waiting for it, so that its CPU time can still be read."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def last_words(self) -> str:
        return self.output[-LAST_WORDS:]

    def wait_until(self, done: Callable[[], T], *, what: str, timeout_s: float) -> T:
        """The first true value of `done`, which this process is to bring about."""
        deadline = time.monotonic() + timeout_s
        while not (value := done()):
            if self.ended and not (value := done()):
                raise RunError(f"{self.name} ended before {what}. Its last words:\n{self.last_words}")
            if time.monotonic() > deadline:
                raise RunError(f"waited {timeout_s:g} s for {what}. The last words of {self.name}:\n{self.last_words}")
            time.sleep(POLL_S)
        return value

    def terminate(self) -> None:
        """SIGTERM, to itself alone: it is to end what it started."""
        if self._popen.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, with everything that it started."""
        if self._popen.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()
