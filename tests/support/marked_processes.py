"""Processes that are found by an environment variable which they inherit, whatever starts them."""

import os
import signal
import uuid
from pathlib import Path

from support.waiting import wait_until

ROOT = str(Path(__file__).parents[2])


class MarkedProcesses:
    def __init__(self) -> None:
        self.mark = f"MARKED_TEST={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        self.env = {key: text for key, text in os.environ.items() if not key.startswith("HEADPOND_")}
        self.env |= {name: value, "PYTHONPATH": ROOT}

    def processes(self) -> dict[int, str]:
        """Process id -> command of every living process."""
        all_pids = {int(path.name): path for path in Path("/proc").iterdir() if path.name.isdigit()}
        ours = {pid: _read(path / "cmdline") for pid, path in all_pids.items() if self.mark in _read(path / "environ")}
        return {pid: command for pid, command in ours.items() if command}

    def running(self, word: str) -> list[int]:
        """Processes whose command has `word`."""
        return [pid for pid, command in self.processes().items() if word in command]

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), what="the end of every process")

    def kill(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
