"""A real Celery worker process, started with the real command; it ends with the tests."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from headpond.processes.child_programs import LAUNCHER
from support.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]


class WorkerProcess:
    """`with WorkerProcess("headpond.workers.rollouts", "-Q", "rollouts", log=path, env={...}) as worker: ...`"""

    def __init__(self, app: str, *options: str, name: str, log: Path, env: dict[str, str]) -> None:
        self.name = f"{name}@tests"
        self._command = ["celery", "-A", app, "worker", "-n", self.name, "-l", "INFO", *options]
        self._log = log
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        bin_dir = Path(sys.executable).parent
        launched = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), str(bin_dir / self._command[0])]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **self._env}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*launched, *self._command[1:]], cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_ready(self) -> None:
        wait_until(lambda: f"{self.name} ready." in self.log or self._ended())
        assert not self._ended(), f"the worker ended while it started:\n{self.log}"

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = HANG_S) -> int:
        """The exit code."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker did not end in {timeout_s:g} s:\n{self.log}") from None

    def _ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None and not self._ended():
            self._process.kill()
            self._process.wait()
