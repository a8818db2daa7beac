"""Readings from /proc: CPU time, time without a core, memory and bytes read of a process."""

import os
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
KIB = 1024


def cpu_s(pid: int) -> float:
    """User and system time of all threads of a process and its descendants, including those it has waited for.

    A zombie's time can still be read. 0 for a process that has been waited for.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        children = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # The command, in parentheses, may contain spaces. Behind it: fields 3 and on; 14 to 17 are utime, stime, cutime,
    # cstime.
    ticks = sum(int(field) for field in stat.rpartition(")")[2].split()[11:15])
    return ticks / TICKS_A_SECOND + sum(cpu_s(int(child)) for line in children for child in line.split())


def queued_s(pid: int) -> float:
    """Time that the main thread was runnable without a core, since it started."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9


def read_bytes(pid: int) -> int:
    """Bytes read from files, pipes and sockets since the process started."""
    counters = Path(f"/proc/{pid}/io").read_text()
    return int(counters.partition("rchar: ")[2].split()[0])


def resident_bytes(pid: int) -> int:
    """Resident memory; 0 when the process has ended."""
    return KIB * _status_kib(pid, "VmRSS:")


def resident_mb(pid: int) -> float:
    return _status_kib(pid, "VmRSS:") / 1000


def peak_mb(pid: int) -> float:
    """Largest resident memory since the process started, or since `reset_peak`."""
    return _status_kib(pid, "VmHWM:") / 1000


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def proportional_mib(pid: int) -> float:
    """Memory of a process and its descendants; a page that several processes share counts once."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    children = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return kib / 1024 + sum(proportional_mib(int(child)) for line in children for child in line.split())


def _status_kib(pid: int, field: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(status.partition(field)[2].split()[0]) if field in status else 0
