"""The store protocol: immutable blobs by key, and the local files in which they grow.

A custom store implements the six abstract methods. They fit an object store: no rename, no append.
Local files live in `spool_dir`, by default a scratch directory from which blobs are uploaded.
"""

import contextlib
import os
import re
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from headpond.errors import BlobCorrupt, BlobError, BlobMissing, raised_at, text_of
from headpond.store import scratch
from headpond.store.atomic import temporary_path, writing
from headpond.store.parts import Part, Piece, checksum, mapped

# No leading dot, so neither ".." nor the temporary name of an unfinished file is a key. 200 characters leave room for
# the rest of a temporary name.
NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}"
KEY = re.compile(rf"{NAME}(/{NAME})*", re.ASCII)

BYTES_PER_READ = 1 << 24  # bounds the memory of a download; large enough for one request each

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, kw_only=True)
class BlobRef:
    """A blob by its key, with the size and checksum that its bytes must have."""

    key: str
    size: int
    checksum: str
    """xxh3 64, hexadecimal; `store/parts.py` defines the order of the bytes"""


def is_key(text: str) -> bool:
    return KEY.fullmatch(text) is not None


def check_key(key: str) -> None:
    if not is_key(key):
        raise BlobError(f"{key!r} is not a key: names of letters, digits, . _ - joined by /, none beginning with a dot")


class Store(ABC):
    """A store of blobs, opened by `open_store(url)` only. Methods block; threads may call them
    concurrently.

    The constructor takes the URL and connects to nothing: every process that loads the
    configuration calls it. Implementations raise BlobMissing for an absent blob, and BlobUnwritten
    for a write that may succeed later.
    """

    shared: ClassVar[bool] = True
    """Whether other processes see the blobs. A run needs that."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.address = url.partition("://")[2]
        """the URL behind `://`"""
        self._kept_spool: str | None = None

    def __str__(self) -> str:
        return self.url

    # Every store implements these. Keys have been checked.

    @abstractmethod
    def write(self, key: str, content: bytes | memoryview) -> None:
        """Create or replace a blob. Readers see it complete or not at all. Do not keep `content`:
        it may be mapped from a file."""

    @abstractmethod
    def create(self, key: str, content: bytes) -> bool:
        """Create a durable blob in one step that at most one caller completes (a conditional put).
        Return False, and leave the blob as it is, if there is one."""

    @abstractmethod
    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes from `start` to `stop` or the end. BlobMissing if there is no such blob."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Bytes of a blob; None if there is none."""

    @abstractmethod
    def keys(self, under: str) -> Iterator[str]:
        """Keys that begin with `under` and a slash, in any order."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a blob, if there is one. The deletion may take effect later."""

    # A directory does these in place. Any other store uses a directory of this host.

    @property
    def spool_dir(self) -> Path:
        """Directory of this host. Files grow in it until they are published."""
        return scratch.directory(self.url, self._kept_spool)

    def keep_spool(self, name: str) -> None:
        """Keep unfinished files when this process ends. The next one of this host with that `name`
        finds them."""
        self._kept_spool = name

    def publish(self, path: Path, key: str) -> None:
        """Make a complete file of `spool_dir` the blob `key`; the file goes away."""
        check_key(key)
        with path.open("rb") as file:
            self.write(key, mapped(file.fileno()).data)
        path.unlink()

    def take_back(self, key: str, path: Path) -> None:
        """Undo `publish`, if the blob is there."""
        if self.size(key) is not None:
            self.export(key, path)
            self.delete(key)

    def export(self, key: str, path: Path) -> None:
        """Create a file with the blob's bytes. It may be a hard link: do not change it."""
        with writing(path), path.open("xb") as file:
            self._download(key, file)

    def map(self, key: str) -> Bytes:
        """The bytes of a blob, memory-mapped and read-only. The default maps a file that goes away
        with the map."""
        with writing(self.spool_dir), tempfile.TemporaryFile(dir=self.spool_dir) as file:
            self._download(key, file)
            file.flush()
            return mapped(file.fileno())

    def sync(self, keys: Iterable[str]) -> None:
        """Make blobs survive a power cut. The default only checks that they exist: `write` makes
        them durable."""
        for key in keys:
            if self.size(key) is None:
                raise self.missing(key)

    def names(self, under: str) -> Collection[str]:
        """The first component of each key below `under`."""
        return {key[len(under) + 1 :].partition("/")[0] for key in self.keys(under)}

    def unnamed(self, under: str, *, named: Collection[str]) -> dict[str, int]:
        """Name -> bytes of everything that `sweep` would delete."""
        blobs = {key: self.size(key) or 0 for key in self.keys(under) if key not in named}
        return blobs | scratch.unnamed(self.spool_dir, self.local_path(under), named)

    def sweep(self, under: str, *, named: Collection[str]) -> list[str]:
        """Delete every blob, and every unfinished file of this host, below `under` that `named`
        does not list."""
        check_key(under)
        removed = [key for key in self.keys(under) if key not in named]
        for key in removed:
            self.delete(key)
        return sorted([*removed, *scratch.sweep(self.spool_dir, self.local_path(under), named)])

    def check(self) -> None:
        """Raise an error if the store cannot be used. A run calls this when it begins.

        The default tries the six methods on a key of its own. BlobError names the method that fails
        or breaks the protocol.
        """
        _probe(self)

    def tidy(self, under: str) -> None:  # noqa: B027  most stores leave nothing
        """Remove the leftovers of killed `write` and `create` calls. Only the run's orchestrator
        uses them, and calls this."""

    def location(self, key: str) -> str:
        """The address at which a person finds a blob."""
        return f"{self.url.rstrip('/')}/{key}"

    # All stores share these.

    def local_path(self, key: str) -> Path:
        """The path of `key` below `spool_dir`. BlobError if the key is malformed or leads through a
        symbolic link."""
        check_key(key)
        root = self.spool_dir
        if any(map(os.path.islink, accumulate(key.split("/"), os.path.join, initial=str(root)))):
            raise BlobError(f"key {key} leads through a symbolic link: a store holds plain files and directories")
        return root / key

    def part_path(self, key: str, suffix: str | None = None) -> Path:
        """The path at which a blob grows. A given suffix lets a later process find its file; the
        default is random."""
        return temporary_path(self.local_path(key), suffix or secrets.token_hex(8))

    def part(self, key: str, *, suffix: str | None = None, reserve_head: bool = False) -> Part:
        """Begin a blob."""
        part = Part(self.part_path(key, suffix), reserve_head=reserve_head)
        part.create()
        return part

    def commit(self, part: Part, key: str, *, head: bytes = b"") -> BlobRef:
        size, digest = part.finish(head=head)
        self.publish(part.path, key)
        return BlobRef(key=key, size=size, checksum=digest)

    def put(self, key: str, pieces: Iterable[Piece]) -> BlobRef:
        """Write the pieces one after the other as one blob. It appears when it is complete."""
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

    def open(self, ref: BlobRef, *, verify: bool = True) -> Bytes:
        """The blob's bytes, memory-mapped and read-only. The size is always checked, the checksum
        if `verify`."""
        check_key(ref.key)
        content = self.map(ref.key)
        self._check_size(ref, content.size)
        if verify and (actual := checksum(content)) != ref.checksum:
            raise BlobCorrupt(f"blob {ref.key} has checksum {actual} instead of {ref.checksum} in {self}")
        return content

    def require(self, ref: BlobRef) -> None:
        """Check that the blob is there with its size, without reading it."""
        check_key(ref.key)
        if (size := self.size(ref.key)) is None:
            raise self.missing(ref.key)
        self._check_size(ref, size)

    def missing(self, key: str) -> BlobMissing:
        return BlobMissing(f"blob {key} is not in {self}: it was released, or this is another store")

    def _check_size(self, ref: BlobRef, actual: int) -> None:
        if actual != ref.size:
            raise BlobCorrupt(f"blob {ref.key} has {actual} bytes instead of {ref.size} in {self}")

    def _download(self, key: str, file: BinaryIO) -> None:
        size = self.size(key)
        if size is None:
            raise self.missing(key)
        for start in range(0, size, BYTES_PER_READ):
            file.write(self.read(key, start, min(size, start + BYTES_PER_READ)))


def _probe(store: Store) -> None:
    """Call each of the six methods as Headpond does, on keys that no run uses."""
    folder = f"probe/{secrets.token_hex(8)}"
    key, none, first, second = f"{folder}/blob", f"{folder}/none", b"the first", b"the second one"
    cases: list[tuple[str, str, Callable[[], object], object]] = [
        ("size", "of a missing key", lambda: store.size(key), None),
        ("create", "of a missing key", lambda: store.create(key, first), True),
        ("create", "of a key that is there", lambda: store.create(key, second), False),
        ("read", "after create", lambda: store.read(key), first),
        ("read", "of bytes 2 to 5", lambda: store.read(key, 2, 5), first[2:5]),
        ("read", "from byte 2", lambda: store.read(key, 2), first[2:]),
        ("write", "of a key that is there", lambda: store.write(key, memoryview(second)), ...),
        ("read", "after write", lambda: store.read(key), second),
        ("size", f"of {len(second)} bytes", lambda: store.size(key), len(second)),
        ("keys", f"under {folder!r}", lambda: list(store.keys(folder)), [key]),
        ("keys", f"under {key[:-1]!r}, which no slash follows", lambda: list(store.keys(key[:-1])), []),
        ("delete", "of a key that is there", lambda: store.delete(key), ...),
        ("delete", "of a missing key", lambda: store.delete(none), ...),
        ("read", "of a missing key", lambda: store.read(none), BlobMissing),
    ]
    try:
        for method, case, call, expected in cases:
            _check_call(f"{type(store).__name__}.{method} {case}", call, expected)
    finally:
        with contextlib.suppress(Exception):  # the error above names the method that failed
            store.delete(key)


def _check_call(label: str, call: Callable[[], object], expected: object) -> None:
    """`expected`: the result, the error, or any result (...)."""
    try:
        result = call()
    except Exception as error:
        if expected is BlobMissing and isinstance(error, BlobMissing):
            return
        raise BlobError(f"{label} raised {text_of(error)} ({raised_at(error)})") from error
    if expected is BlobMissing:
        raise BlobError(f"{label} returned {result!r}: it must raise BlobMissing")
    if expected is not ... and (type(result) is not type(expected) or result != expected):
        raise BlobError(f"{label} returned {result!r}: it must return {expected!r}")
