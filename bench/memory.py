"""Memory of a process, read from /proc."""

from pathlib import Path


def resident_mb(pid: int) -> float:
    """0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return int(status.partition("VmRSS:")[2].split()[0]) / 1000 if "VmRSS:" in status else 0.0
