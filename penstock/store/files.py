"""The store in a directory: immutable blobs, a file each, shared by every host of a run.

The root comes from each process's own configuration; a key from a message cannot lead out of it.
"""

import errno
import mmap
import os
import secrets
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from penstock.errors import BlobCorrupt, BlobError, BlobMissing, ConfigError
from penstock.store.atomic import temporary_path, writing
from penstock.store.base import BlobRef, check_key
from penstock.store.parts import Part, Piece, checksum


def open_store(url: str) -> "Store":
    """The store at `file:///a/directory`. The directory is created with the first blob."""
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"store {url!r} is not the URL of a directory: write file:///path/to/a/shared/directory")
    return Store(Path(unquote(parts.path)))


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def path(self, key: str) -> Path:
        """The file of a key. Keys that are malformed or lead through a symbolic link are refused."""
        check_key(key)
        path = self.root / key
        if any(map(os.path.islink, accumulate(key.split("/"), os.path.join, initial=str(self.root)))):
            raise BlobError(f"key {key} leads through a symbolic link: a store holds plain files and directories")
        return path

    # writing

    def put(self, key: str, pieces: Iterable[Piece]) -> BlobRef:
        """Write the pieces one after the other as one blob, which appears when it is complete."""
        part = self.part(key)
        try:
            if isinstance(pieces, list):
                part.append(*pieces)
            else:
                for piece in pieces:
                    part.append(piece)
            return self.commit(part, key)
        except BaseException:
            part.discard()
            raise

    def part(self, key: str, *, suffix: str | None = None, reserve_head: bool = False) -> Part:
        """Begin a blob. A given suffix lets a later process find its file; the default is random."""
        part = Part(self.part_path(key, suffix), reserve_head=reserve_head)
        part.create()
        return part

    def part_path(self, key: str, suffix: str | None = None) -> Path:
        return temporary_path(self.path(key), suffix or secrets.token_hex(8))

    def commit(self, part: Part, key: str, *, head: bytes = b"") -> BlobRef:
        size, digest = part.commit(self.path(key), head=head)
        return BlobRef(key=key, size=size, checksum=digest)

    def move(self, ref: BlobRef, key: str) -> BlobRef:
        """Rename a blob."""
        target = self.path(key)
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.path(ref.key).replace(target)
            except FileNotFoundError:
                raise BlobMissing(f"blob {ref.key} is not in {self.root}: it was moved or deleted") from None
        return replace(ref, key=key)

    def sync(self, keys: Iterable[str]) -> None:
        """Make blobs survive a power cut: fsync their bytes, then every directory on the way to them once."""
        paths = [self.path(key) for key in keys]
        parents = {parent for path in paths for parent in path.parents if parent.is_relative_to(self.root)}
        for path in [*paths, *sorted(parents, reverse=True)]:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise BlobMissing(f"blob {path.relative_to(self.root)} is not in {self.root}") from None
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    # reading

    def open(self, ref: BlobRef, *, verify: bool = True) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The blob's bytes, memory-mapped and read-only. Checks the size always, the checksum if `verify`."""
        content = self._map(ref.key)
        if content.size != ref.size:
            raise BlobCorrupt(f"blob {ref.key} has {content.size} bytes instead of {ref.size} in {self.root}")
        if verify and (actual := checksum(content)) != ref.checksum:
            raise BlobCorrupt(f"blob {ref.key} has checksum {actual} instead of {ref.checksum} in {self.root}")
        return content

    def _map(self, key: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        path = self.path(key)
        try:
            with path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
                    return np.frombuffer(b"", np.uint8)
                return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except (FileNotFoundError, NotADirectoryError):
            raise BlobMissing(f"blob {key} is not in {self.root}: it was released, or this is another store") from None
        except IsADirectoryError:
            raise BlobCorrupt(f"blob {key} is a directory in {self.root}") from None

    # deleting

    def delete(self, key: str) -> bool:
        """False if there is no such blob."""
        try:
            self.path(key).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def sweep(self, under: str, *, named: Collection[str]) -> list[str]:
        """Delete every file below a directory, parts included, that `named` does not list; then empty directories."""
        top = self.path(under)
        removed = [path for path in _files(top) if self._key(path) not in named]
        for path in removed:
            path.unlink(missing_ok=True)
        for directory in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
            _remove_if_empty(directory)
        _remove_if_empty(top)
        return sorted(self._key(path) for path in removed)

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
