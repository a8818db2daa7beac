"""The store in a directory: a file for each blob, shared by every host of a run. Blobs grow beside their final names.

The root comes from each process's own configuration; a key from a message cannot lead out of it.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headpond.errors import BlobCorrupt, BlobMissing, ConfigError
from headpond.store import atomic, scratch
from headpond.store.atomic import writing
from headpond.store.base import KEY, Bytes, Store
from headpond.store.parts import mapped

NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP)  # another file system, or one without hard links


def directory_of(url: str) -> Path:
    """The directory of `file:///a/directory`, whose path may be percent-encoded."""
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"store {url!r} is not the URL of a directory: write file:///absolute/path")
    return Path(unquote(parts.path))


class FileStore(Store):
    """A store in a directory, which is created with the first blob."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.root = directory_of(url).resolve()

    def __str__(self) -> str:
        return str(self.root)

    @property
    def spool_dir(self) -> Path:
        return self.root

    def keep_spool(self, name: str) -> None:
        pass  # the directory is shared: every process finds every file

    def path(self, key: str) -> Path:
        """The file of a key."""
        return self.local_path(key)

    def location(self, key: str) -> str:
        return str(self.root / key)

    # writing

    def write(self, key: str, content: bytes | memoryview) -> None:
        path = self.path(key)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(path, content)

    def create(self, key: str, content: bytes) -> bool:
        return atomic.create_durably(self.path(key), content)

    def publish(self, path: Path, key: str) -> None:
        target = self.path(key)
        with writing(target):
            path.replace(target)

    def take_back(self, key: str, path: Path) -> None:
        blob = self.path(key)
        if blob.exists():
            blob.rename(path)

    def sync(self, keys: Iterable[str]) -> None:
        """fsync the bytes of blobs, then every directory above them once.

        BlobUnwritten if an fsync fails. Bytes may then be lost although a later fsync succeeds:
        verify the blobs after it.
        """
        paths = [self.path(key) for key in keys]
        parents = {parent for path in paths for parent in path.parents if parent.is_relative_to(self.root)}
        for path in [*paths, *sorted(parents, reverse=True)]:
            with writing(path):
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    raise BlobMissing(f"blob {path.relative_to(self.root)} is not in {self}") from None
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    # reading

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        try:
            with self.path(key).open("rb") as file:
                file.seek(start)
                return file.read() if stop is None else file.read(stop - start)
        except (FileNotFoundError, NotADirectoryError):
            raise self.missing(key) from None

    def size(self, key: str) -> int | None:
        try:
            return self.path(key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def map(self, key: str) -> Bytes:
        try:
            with self.path(key).open("rb") as file:
                return mapped(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            raise self.missing(key) from None
        except IsADirectoryError:
            raise BlobCorrupt(f"blob {key} is a directory in {self}") from None

    def export(self, key: str, path: Path) -> None:
        """Create a hard link, or a copy where the file system has no links."""
        with writing(path):
            try:
                path.hardlink_to(self.path(key))
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                shutil.copyfile(self.path(key), path)

    def keys(self, under: str) -> Iterator[str]:
        for directory, _, names in os.walk(self.path(under)):
            here = Path(directory).relative_to(self.root).as_posix()
            yield from (key for name in names if KEY.fullmatch(key := f"{here}/{name}"))

    def names(self, under: str) -> Collection[str]:
        try:
            return os.listdir(self.path(under))  # noqa: PTH208  names only, of up to 100,000
        except FileNotFoundError:
            return []

    # deleting

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.path(key).unlink()

    def unnamed(self, under: str, *, named: Collection[str]) -> dict[str, int]:
        return scratch.unnamed(self.root, self.path(under), named)

    def sweep(self, under: str, *, named: Collection[str]) -> list[str]:
        return scratch.sweep(self.root, self.path(under), named)

    def check(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def tidy(self, under: str) -> None:
        atomic.sweep(self.path(under), below=True)
