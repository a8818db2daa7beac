"""The one `SyncProcess` of a prefork child, made at its first job: a connection does not survive a fork."""

import functools
import os

from tasks.execution import SyncProcess
from tasks.settings import settings


def stage_process() -> SyncProcess:
    return _of_pid(os.getpid())


@functools.lru_cache(maxsize=1)
def _of_pid(pid: int) -> SyncProcess:
    return SyncProcess(settings())
