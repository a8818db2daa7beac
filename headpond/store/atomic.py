"""Files written under a temporary name and renamed when complete, so readers never see a partial
file.

Owns the temporary names, the rename or link that publishes a file, and the fsync of directories.
Files have the permissions of the umask. `sweep` removes the leftovers of a killed writer;
`Store.sweep` removes them with their directory.
"""

import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from headpond.errors import BlobUnwritten


def temporary_path(path: Path, suffix: str) -> Path:
    """The path to write to until `path` is complete. Its leading dot keeps it out of the store's
    keys."""
    return path.with_name(f".{path.name}.{suffix}")


@contextmanager
def replacing(path: Path, *, suffix: str | None = None) -> Generator[Path]:
    """Yield a temporary path, which replaces `path` after the body. An error removes it instead.

    A fixed `suffix` overwrites the leftover of a killed writer. Without one, every call has a path
    of its own: a cancelled writer may still be writing in its thread.
    """
    temporary = temporary_path(path, suffix or _random_suffix())
    if suffix:
        temporary.unlink(missing_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # renaming onto a hard link of the same file leaves both names


def write(path: Path, content: bytes | memoryview, *, durable: bool = False, suffix: str | None = None) -> None:
    """Replace `path`. Raises OSError."""
    with replacing(path, suffix=suffix) as temporary:
        _fill(temporary, content, durable=durable)


def write_durably(path: Path, content: bytes, *, suffix: str | None = None) -> None:
    """Replace `path`, make its directory, and sync both to disk. Raises BlobUnwritten."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, content, durable=True, suffix=suffix)
        sync_directory(path.parent)


def create_durably(path: Path, content: bytes) -> bool:
    """Create `path` like `write_durably`. Return False, and leave the file as it is, if it exists."""
    temporary = temporary_path(path, _random_suffix())
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _fill(temporary, content, durable=True)
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
            for directory in (path.parent, path.parent.parent):  # the first file of a step made its directory too
                sync_directory(directory)
    return True


class UnfinishedFile:
    """A file under its temporary name, for writers that live longer than one call. Raises BlobUnwritten."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        with writing(self.path):
            try:
                descriptor = self._open_new()
            except FileNotFoundError:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = self._open_new()
            try:
                os.close(descriptor)
            except OSError:
                self.discard()
                raise

    def _open_new(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)


class writing:  # noqa: N801  a context, used like a function
    """Raise BlobUnwritten for an OSError of the body. The store wraps every write, close, fsync,
    rename and link.

    A network file system may report a full disk or quota at any of them.
    """

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise BlobUnwritten(
                f"cannot write {self._path}: {error.strerror}; check free space and permissions of its directory"
            ) from error


def sweep(directory: Path, name: str = "", *, below: bool = False) -> None:
    """Remove the leftovers of killed writers, for file names that begin with `name`. `below`
    includes subdirectories."""
    for leftover in directory.glob(f"{'**/' if below else ''}.{name}*.tmp"):
        leftover.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _random_suffix() -> str:
    return f"{uuid.uuid4().hex[:8]}.tmp"


def _fill(path: Path, content: bytes | memoryview, *, durable: bool) -> None:
    with path.open("xb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
