"""The store: immutable blobs under one root, named by keys. A BlobRef says which bytes a key must give.

The root comes from each process's own configuration; a key from a message can never lead out of it.
"""

import errno
import mmap
import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from penstock.errors import BlobCorrupt, BlobError, BlobMissing, ConfigError
from penstock.store.parts import Part, Piece, checksum, writing

# Never a leading dot: "..", and the temporary names of parts, are no keys. 200 leaves room for a temporary name's rest.
NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}"
KEY = re.compile(rf"{NAME}(/{NAME})*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class BlobRef:
    key: str
    size: int
    checksum: str  # xxh3 64, hex; parts.py says over which bytes


def open_store(url: str) -> "Store":
    """`file:///a/directory`, shared by every host of the run. Made when something is written."""
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"store {url!r} is not a directory's URL: write file:///path/to/a/shared/directory")
    return Store(Path(unquote(parts.path)))


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def path(self, key: str) -> Path:
        """The file of a key, refusing every key that is not plain names below the root, symbolic links included."""
        if not KEY.fullmatch(key):
            raise BlobError(
                f"{key!r} is no key: names of letters, digits, . _ - joined by /, none beginning with a dot"
            )
        path = self.root / key
        if any(map(os.path.islink, accumulate(key.split("/"), os.path.join, initial=str(self.root)))):
            raise BlobError(f"key {key} leads through a symbolic link: a store holds plain files and directories")
        return path

    def part(self, key: str, *, suffix: str | None = None, reserve_head: bool = False) -> Part:
        """A file that will be `key`. A suffix of one's own lets a later process find it; without, it is random."""
        part = Part(self.part_path(key, suffix or secrets.token_hex(8)), reserve_head=reserve_head)
        part.create()
        return part

    def part_path(self, key: str, suffix: str) -> Path:
        path = self.path(key)
        return path.with_name(f".{path.name}.{suffix}")

    def commit(self, part: Part, key: str, *, head: bytes = b"") -> BlobRef:
        size, digest = part.commit(self.path(key), head=head)
        return BlobRef(key=key, size=size, checksum=digest)

    def move(self, ref: BlobRef, key: str) -> BlobRef:
        """The same blob under another key."""
        target = self.path(key)
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.path(ref.key).replace(target)
            except FileNotFoundError:
                raise BlobMissing(f"blob {ref.key} is not in {self.root}: it was moved or deleted") from None
        return replace(ref, key=key)

    def put(self, key: str, pieces: Iterable[Piece]) -> BlobRef:
        """Writes the pieces one after the other, as one blob that appears when it is complete."""
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

    def open(self, ref: BlobRef, *, verify: bool = True) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The blob's bytes, memory-mapped and read-only; size always checked, every byte when `verify`."""
        content = self._map(ref.key)
        if content.size != ref.size:
            raise BlobCorrupt(f"blob {ref.key} has {content.size} bytes instead of {ref.size} in {self.root}")
        if verify and (found := checksum(content)) != ref.checksum:
            raise BlobCorrupt(f"blob {ref.key} has checksum {found} instead of {ref.checksum} in {self.root}")
        return content

    def sync(self, keys: Iterable[str]) -> None:
        """Makes blobs survive a power cut: their bytes, then the names that lead to them, each directory once."""
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

    def delete(self, key: str) -> bool:
        """Whether there was something to delete."""
        try:
            self.path(key).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def keys(self, under: str) -> list[str]:
        """Blobs below a directory, sorted; parts are not among them."""
        return sorted(key for path in self._files(under) if KEY.fullmatch(key := self._key(path)))

    def sweep(self, under: str, *, named: Collection[str]) -> list[str]:
        """Deletes every file below a directory, parts too, that `named` does not list; then empty directories."""
        removed = [path for path in self._files(under) if self._key(path) not in named]
        for path in removed:
            path.unlink(missing_ok=True)
        top = self.path(under)
        for directory in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
            _remove_if_empty(directory)
        _remove_if_empty(top)
        return sorted(self._key(path) for path in removed)

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _files(self, under: str) -> Iterator[Path]:
        return (path for path in self.path(under).rglob("*") if path.is_symlink() or not path.is_dir())

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


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
