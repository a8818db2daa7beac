"""State of processes, read from /proc."""

import contextlib
from pathlib import Path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children() -> frozenset[int]:
    """Children of this process, of all its threads, zombies included."""
    children_of_threads: list[list[str]] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # a thread that ended meanwhile
            children_of_threads.append(path.read_text().split())
    return frozenset(int(pid) for pids in children_of_threads for pid in pids)
