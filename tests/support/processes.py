"""State of processes, read from /proc."""

import contextlib
import os
import signal
from pathlib import Path


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
