"""Local directories for stores that are no directory themselves. Blobs grow in them, and are
downloaded to them.

They lie in the directory for temporary files (TMPDIR), one for each process. The next process
removes those of ended processes. Directories that are kept under a name stay: a session server
finds its unsealed sessions again.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from errno import EEXIST, ENOENT, ENOTEMPTY
from pathlib import Path

import xxhash

from headpond.errors import ConfigError

KEPT = "kept-"  # begins the names of directories that outlive their process
LOCK = ".lock"

# process and URL -> its directory; a forked child has one of its own
_claimed: dict[tuple[int, str], Path] = {}
_claiming = threading.Lock()


def directory(url: str, kept_name: str | None = None) -> Path:
    """This process's directory for the store at `url`, or the one that is kept under `kept_name`."""
    if kept_name:
        path = _root(url) / f"{KEPT}{kept_name}"
        path.mkdir(exist_ok=True)
        return path
    process = (os.getpid(), url)
    if process not in _claimed:
        with _claiming:
            if process not in _claimed:
                _claimed[process] = _claim(_root(url))
    return _claimed[process]


def sweep(root: Path, top: Path, named: Collection[str]) -> list[str]:
    """Delete every file below `top` whose path from `root` is not in `named`, then empty directories."""
    if remove_if_empty(top):
        return []
    removed = [path for path in _files(top) if path.relative_to(root).as_posix() not in named]
    for path in removed:
        path.unlink(missing_ok=True)
    for subdirectory in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
        remove_if_empty(subdirectory)
    remove_if_empty(top)
    return sorted(path.relative_to(root).as_posix() for path in removed)


def unnamed(root: Path, top: Path, named: Collection[str]) -> dict[str, int]:
    """Path from `root` -> bytes of every file that `sweep` would delete."""
    sizes = dict[str, int]()
    for path in _files(top):
        if (name := path.relative_to(root).as_posix()) not in named:
            with contextlib.suppress(FileNotFoundError):
                sizes[name] = path.lstat().st_size
    return sizes


def remove_if_empty(directory: Path) -> bool:
    """Remove a directory if it is empty. Return whether it is gone."""
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (ENOTEMPTY, EEXIST, ENOENT):
            raise
        return error.errno == ENOENT
    return True


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())


def _root(url: str) -> Path:
    """The directory that all processes of this user and host share for one store. Other users
    cannot write to it."""
    home = Path(tempfile.gettempdir()) / f"headpond-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    status = home.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{home} belongs to another user or is open to others: set TMPDIR to a directory of your own")
    root = home / xxhash.xxh3_64_hexdigest(url.encode())
    root.mkdir(exist_ok=True)
    return root


def _claim(root: Path) -> Path:
    """Create a directory that is locked until this process ends. Remove those whose lock is free."""
    with _locked(root / LOCK):
        for other in root.iterdir():
            if other.is_dir() and not other.name.startswith(KEPT) and (lock := _try_lock(other / LOCK)) is not None:
                shutil.rmtree(other, ignore_errors=True)
                os.close(lock)
        path = root / secrets.token_hex(8)
        path.mkdir()
        _try_lock(path / LOCK)
    return path


@contextmanager
def _locked(path: Path) -> Generator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock while it is open; None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
