"""Memory of a process, read from /proc."""

from pathlib import Path


def resident_mb(pid: int) -> float:
    """0 when it has ended."""
    return _status_mb(pid, "VmRSS:")


def peak_mb(pid: int) -> float:
    """The most that was resident since it began, or since `forget_peak`."""
    return _status_mb(pid, "VmHWM:")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status_mb(pid: int, field: str) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return int(status.partition(field)[2].split()[0]) / 1000 if field in status else 0.0
