"""A disk of a few megabytes that can be filled: a tmpfs in a mount namespace, which ends with its process.

Processes that use it are started with `enter` before their command; in this process its path is `inside`. Where
mounting is not permitted, other faults make the same calls fail.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headpond.processes.child_programs import LAUNCHER

SIZE_BYTES = 8 << 20
LARGE_BYTES = 1 << 16  # above a status and a log of a short run, below a ledger's log of one
SCRIPT = 'mount -t tmpfs -o size="$2" headpond "$1" && echo mounted && exec sleep infinity'
# As root; else in a user namespace, where the kernel allows one.
NAMESPACES = (["--mount"], ["--mount", "--user", "--map-root-user"])


@contextmanager
def filled(directory: Path) -> Iterator[None]:
    """Nothing can be written to the directory's disk for the duration of the block."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for block in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(block))
    try:
        yield
    finally:
        filler.unlink()


class SmallDisk:
    def __init__(self, directory: Path, holder: subprocess.Popen[bytes], *, user: bool) -> None:
        self.directory = directory
        self.inside = Path(f"/proc/{holder.pid}/root") / directory.relative_to("/")
        as_user = ["--user", "--preserve-credentials"] if user else []
        self.enter = ["nsenter", "--target", str(holder.pid), "--mount", *as_user, "--"]

    @contextmanager
    def full(self, pid: int, folder: str) -> Iterator[None]:
        """Fill the disk for the duration of the block."""
        with filled(self.inside):
            yield


class LimitedDirectory:
    """An ordinary directory, for systems where mounting is not permitted and for this process itself."""

    def __init__(self, directory: Path) -> None:
        self.directory = self.inside = directory
        self.enter: list[str] = []

    @contextmanager
    def full(self, pid: int, folder: str) -> Iterator[None]:
        """Limit files of `pid` to the size of the largest in `folder`, or replace a folder of small files by a file."""
        place = self.directory / folder
        largest = max((path.stat().st_size for path in place.iterdir() if path.is_file()), default=0)
        with _limited(pid, largest) if largest > LARGE_BYTES else _no_folder(place):
            yield


@contextmanager
def _limited(pid: int, size: int) -> Iterator[None]:
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))


@contextmanager
def _no_folder(place: Path) -> Iterator[None]:
    aside = place.with_name("aside")
    place.rename(aside)
    place.touch()
    try:
        yield
    finally:
        place.unlink()
        aside.rename(place)


@contextmanager
def small_disk(directory: Path) -> Iterator[SmallDisk | LimitedDirectory]:
    directory.mkdir()
    for namespaces in NAMESPACES:
        command = ["unshare", *namespaces, "sh", "-c", SCRIPT, "sh", str(directory), str(SIZE_BYTES)]
        holder = held(command)
        if holder is not None:
            try:
                yield SmallDisk(directory, holder, user="--user" in namespaces)
            finally:
                holder.kill()
                holder.wait()
            return
    yield LimitedDirectory(directory)


def held(command: list[str], says: bytes = b"mounted\n") -> subprocess.Popen[bytes] | None:
    """A process that holds a namespace; it ends with this one. None if it does not say that it has one."""
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), "/usr/bin/env"]
    holder = subprocess.Popen([*launcher, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert holder.stdout is not None
    with holder.stdout as output:
        if output.readline() == says:
            return holder
    holder.wait()
    return None
