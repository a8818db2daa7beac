"""Faults of a process's disks: errors at calls of `os` and `open` below the run directory, errors and kills at commits.

Installed once for all simulated processes; each has a `Disk` of its own, because hosts fail one by one.
"""

import contextvars
import errno
import functools
import io
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from simulation.loop import PROCESS, Killed
from simulation.threads import pause_thread

WRITING = ("fsync", "link", "replace", "rename", "mkdir", "pwritev", "open_for_writing")
READING = ("listdir", "scandir", "open_for_reading", "stat")
DELETING = ("unlink", "rmdir")
ERRORS = {
    errno.ENOSPC: ("fsync", "link", "mkdir", "pwritev", "open_for_writing", "replace"),
    errno.EDQUOT: ("fsync", "link", "mkdir", "pwritev", "open_for_writing", "replace"),
    errno.EIO: (*WRITING, *READING, *DELETING),
    errno.ESTALE: (*WRITING, *READING, *DELETING),
    errno.EBUSY: DELETING,
}
"""error -> the calls that may raise it"""
LAST_COMMIT_MOST_S = 3.0
"""how long a commit takes that a kill ends, at most"""
PATCHED = ("fsync", "link", "replace", "rename", "mkdir", "pwritev", "listdir", "scandir", "unlink", "rmdir", "stat")


class Disk:
    """Of one process. The faults begin when they are set, and end by themselves."""

    def __init__(self, random: Random, clock: Callable[[], float]) -> None:
        self._random = random
        self._clock = clock
        self.error = 0
        self._calls: Collection[str] = ()
        self.error_until = 0.0
        self.error_rate = 0.0
        self.kill_after: int | None = None
        """calls until the process is killed in one"""
        self.ledger_until = 0.0
        """commits fail until then"""
        self.kill_at_commit: str | None = None
        """`before` or `after` the next one"""

    def fail(self, error: int, *, seconds: float, rate: float, calls: Collection[str] | None = None) -> None:
        self.error, self.error_until, self.error_rate = error, self._clock() + seconds, rate
        self._calls = ERRORS[error] if calls is None else calls

    @property
    def sound(self) -> bool:
        return self.kill_after is None and self._clock() >= self.error_until

    def called(self, call: str, path: object) -> None:
        if self.kill_after is not None:
            self.kill_after -= 1
            if self.kill_after < 0:
                self.kill_after = None
                kill_this_process()
        failing = self._clock() < self.error_until and call in self._calls
        if failing and self._random.random() < self.error_rate:
            raise OSError(self.error, os.strerror(self.error), str(path))

    def commits(self) -> None:
        if self.kill_at_commit == "before":
            # Meanwhile the rest of the process goes on: what does not wait for its commit leaves traces of it.
            pause_thread(self._random.uniform(0, LAST_COMMIT_MOST_S))
            kill_this_process()
        if self._clock() < self.ledger_until and self._random.random() < 0.5:
            raise sqlite3.OperationalError("disk I/O error (simulated)")

    def committed(self) -> None:
        """The commit may be on disk although SQLite reports an error."""
        if self.kill_at_commit == "after":
            kill_this_process()
        if self._clock() < self.ledger_until and self._random.random() < 0.5:
            raise sqlite3.OperationalError("disk I/O error after the commit (simulated)")


def kill_this_process() -> None:
    process = PROCESS.get()
    assert process is not None
    process.kill()
    raise Killed


class LedgerConnection(sqlite3.Connection):
    committed: Callable[[sqlite3.Connection], None]
    """called after every commit of a writer; set by the world"""
    disk_of: Callable[[], Disk | None]
    writes = False

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:  # pyright: ignore[reportIncompatibleMethodOverride]
        disk = LedgerConnection.disk_of()
        if sql == "BEGIN IMMEDIATE":
            self.writes = True
        if sql == "COMMIT" and self.writes and disk:
            disk.commits()
        cursor = super().execute(sql, *args)
        if sql == "COMMIT" and self.writes and disk:
            contextvars.Context().run(LedgerConnection.committed, self)  # outside the process, whose disk may fail
            disk.committed()
        return cursor


@contextmanager
def installed(root: Path, disk_of: Callable[[], Disk | None]) -> Iterator[None]:
    """`disk_of` returns the disk of the running process, None in the world."""
    LedgerConnection.disk_of = staticmethod(disk_of)
    prefix = str(root)

    def passed(call: str, path: object) -> None:
        disk = disk_of()
        if disk is not None and not disk.sound and (isinstance(path, int) or str(path).startswith(prefix)):
            disk.called(call, path)

    def patched(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        @functools.wraps(original)
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            passed(name, path)
            return original(path, *args, **kwargs)

        return call

    os_open, io_open = os.open, io.open

    def open_descriptor(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        passed("open_for_writing" if writes else "open_for_reading", path)
        return os_open(path, flags, *args, **kwargs)

    def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        passed("open_for_reading" if mode in ("r", "rb") else "open_for_writing", path)
        return io_open(path, mode, *args, **kwargs)

    with ExitStack() as stack:
        for name in PATCHED:
            stack.enter_context(mock.patch.object(os, name, patched(name)))
        stack.enter_context(mock.patch.object(os, "open", open_descriptor))
        stack.enter_context(mock.patch.object(io, "open", open_file))
        connect = functools.partial(sqlite3.connect, factory=LedgerConnection)
        stack.enter_context(mock.patch.object(sqlite3, "connect", connect))
        yield
