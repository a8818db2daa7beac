"""Hides a process's secrets from other processes of its user: agents' programs run beside it.

Linux shows a process's initial environment to every process of the same user, in
/proc/PID/environ. Unsetting variables does not change it: the memory itself must be overwritten.
Root sees everything.
"""

import ctypes
import os
from pathlib import Path

from headpond.errors import RunError

PR_SET_DUMPABLE = 4
ENV_START, ENV_END = 47, 48  # Fields behind the name in /proc/self/stat.
PREFIX = "HEADPOND_"


def forbid_inspection() -> None:
    """Hide memory, environment and descriptors of this process from processes of its user. Write
    no core dump."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise RunError(f"prctl(PR_SET_DUMPABLE): {os.strerror(ctypes.get_errno())}")


# Passing secrets by a file or a descriptor would change the commands that start workers.
def forget_variables(prefix: str = PREFIX) -> None:
    """Unset the variables with this prefix and overwrite them. Call it after the configuration
    is read."""
    for name in [name for name in os.environ if name.startswith(prefix)]:
        del os.environ[name]
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[ENV_START]), int(fields[ENV_END])
    for variable in ctypes.string_at(start, end - start).split(b"\0"):
        if variable.startswith(prefix.encode()):
            ctypes.memset(start, 0, len(variable))
        start += len(variable) + 1


def inherited_variables() -> dict[str, str]:
    """Return this process's environment without HEADPOND_*, for its children. URLs of Redis and
    engine contain passwords."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
