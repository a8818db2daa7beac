"""Processes found in /proc, by id or by a mark that they inherit, and free ports for them."""

import contextlib
import os
import random
import signal
import socket
import uuid
from pathlib import Path

from support.waiting import wait_until


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int | str = "self") -> frozenset[int]:
    """Children of this process, or of another, of all its threads, zombies included."""
    children_of_threads: list[list[str]] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # a thread that ended meanwhile
            children_of_threads.append(path.read_text().split())
    return frozenset(int(pid) for pids in children_of_threads for pid in pids)


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all that it started: the ranks of torchrun have process groups of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # so that it starts none meanwhile
        for child in children(pid):
            kill_tree(child)
        os.kill(pid, signal.SIGKILL)


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


PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to connections and to servers that ask for any: nothing takes one meanwhile."""


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of as many ports in a row that are free now."""
    while True:
        port = random.choice(PORTS)
        try:
            for each in range(port, port + count):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return port
