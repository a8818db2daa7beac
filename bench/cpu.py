"""CPU time of processes, read from /proc: user and system, of all threads and of everything they started.

And the time that a main thread stood ready in the run queue: no fault of its own.
"""

import os
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Of a process with its descendants, those that it has waited for included. A zombie's time can be read, too."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        children = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # The command, in parentheses, may hold spaces. Then fields 3 and on: utime, stime, cutime, cstime are 14 to 17.
    ticks = sum(int(field) for field in stat.rpartition(")")[2].split()[11:15])
    return ticks / TICKS_A_SECOND + sum(cpu_s(int(child)) for line in children for child in line.split())


def queued_s(pid: int) -> float:
    """Of its main thread, since it began."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
