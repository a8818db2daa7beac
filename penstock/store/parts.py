"""Files that grow under a temporary name until they are complete, and are then renamed: nobody sees half of one."""

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from penstock.errors import BlobCorrupt, BlobMissing, BlobUnwritten

Piece = bytes | bytearray | memoryview | np.ndarray[Any, Any]

# The checksum of a file is xxh3 over its bytes from HEAD on and then over its first HEAD bytes, so that a header can be
# written last. One page: what follows is aligned for every dtype.
HEAD = 4096

_libc_fallocate = getattr(ctypes.CDLL(None), "fallocate", None)  # Python's own writes zeros where it is not supported

# Buffers that one pwritev takes (IOV_MAX on Linux).
BUFFERS_PER_WRITE = 1024

# What recovery reads at once to compute the checksum again: bounds memory.
BYTES_PER_READ = 1 << 22

# Below this much a part's file is not worth reserving space for; above, it is given as much again as it has, at once:
# a quarter less time in writing.
RESERVED_FROM = 1 << 20
FALLOC_FL_KEEP_SIZE = 1

# Opening and closing is a tenth of an append's time. A thousand recordings cost no more descriptors than this.
KEPT_OPEN = threading.BoundedSemaphore(64)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A length to come back to, with the checksum's state there."""

    length: int
    tail: xxhash.xxh3_64


class GrowingFile:
    """Appended to by one writer. No descriptor stays open between two appends: a thousand recordings cost none."""

    def __init__(self, path: Path, *, length: int = 0) -> None:
        self.path = path
        self.length = length

    def create(self) -> None:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def append(self, *pieces: Piece) -> None:
        """All of them or none."""
        self._append([view.cast("B") for view in map(view_of, pieces) if view.nbytes])

    def _append(self, views: list[memoryview]) -> None:
        with writing(self.path):
            descriptor = self._open()
            try:
                _write_all(descriptor, views, self.length)
            except OSError:
                os.ftruncate(descriptor, self.length)
                raise
            finally:
                self._leave(descriptor)
        self.length += sum(map(len, views))

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _leave(self, descriptor: int) -> None:
        os.close(descriptor)


class Part(GrowingFile):
    """A blob to be. With `reserve_head` it begins at HEAD, and `commit` is given what comes before.

    Its descriptor stays open between two appends, while few do.
    """

    def __init__(self, path: Path, *, reserve_head: bool = False) -> None:
        super().__init__(path, length=HEAD if reserve_head else 0)
        self._head = None if reserve_head else bytearray()
        self._tail = xxhash.xxh3_64()
        self._reserved = RESERVED_FROM
        self._kept: int | None = None
        self._give_back: Callable[[], object] | None = None

    @classmethod
    def recover(cls, path: Path, length: int) -> "Part":
        """A part with a reserved head that another process left behind: its first `length` bytes are good."""
        part = cls(path, reserve_head=True)
        if not path.is_file():
            raise BlobMissing(f"{path} is gone: what it was to become cannot be finished")
        with path.open("rb") as file:
            file.seek(HEAD)
            while piece := file.read(min(BYTES_PER_READ, length - part.length)):
                part._tail.update(piece)
                part.length += len(piece)
        if part.length != length:
            raise BlobCorrupt(f"{path} has only {part.length} of the {length} bytes that were written")
        return part

    def _append(self, views: list[memoryview]) -> None:
        super()._append(views)
        for view in views:
            self._digest(view)

    def discard(self) -> None:
        self._close()
        super().discard()

    def tail_checksum(self) -> str:
        """Of what was appended behind the head so far."""
        return self._tail.hexdigest()

    def mark(self) -> Mark:
        return Mark(length=self.length, tail=self._tail.copy())

    def reset(self, mark: Mark) -> None:
        """Forgets what was appended since `mark` was taken; for parts with a reserved head."""
        self.length, self._tail = mark.length, mark.tail.copy()

    def commit(self, target: Path, *, head: bytes = b"") -> tuple[int, str]:
        """Renames to `target` and returns size and checksum. `head` fills the reserved space exactly."""
        assert len(head) == (HEAD if self._head is None else 0)
        self._close()
        with writing(target):
            with self.path.open("r+b") as file:
                file.write(head)
                file.truncate(self.length)
            self.path.replace(target)
        checksum = self._tail.copy()
        checksum.update(head or bytes(self._head or b""))
        return self.length, checksum.hexdigest()

    def _open(self) -> int:
        if self._kept is not None:
            descriptor = self._kept
        else:
            descriptor = super()._open()
            if KEPT_OPEN.acquire(blocking=False):
                self._kept = descriptor
                self._give_back = weakref.finalize(self, _close_kept, descriptor)
        if self.length > self._reserved:
            _reserve(descriptor, self.length)
            self._reserved = 2 * self.length
        return descriptor

    def _leave(self, descriptor: int) -> None:
        if descriptor != self._kept:
            super()._leave(descriptor)

    def _close(self) -> None:
        if self._give_back:
            self._give_back()
            self._kept = self._give_back = None

    def _digest(self, view: memoryview) -> None:
        if self._head is not None and len(self._head) < HEAD:
            missing = HEAD - len(self._head)
            self._head += view[:missing]
            view = view[missing:]
        self._tail.update(view)


def checksum(content: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """What `Part.commit` returns for a file of these bytes."""
    state = xxhash.xxh3_64(content[HEAD:].data)
    state.update(content[:HEAD].data)
    return state.hexdigest()


def view_of(piece: Piece) -> memoryview:
    return piece.data if isinstance(piece, np.ndarray) else memoryview(piece)


def _close_kept(descriptor: int) -> None:
    os.close(descriptor)
    KEPT_OPEN.release()


def _reserve(descriptor: int, length: int) -> None:
    """As many bytes again behind `length`, without changing the file's size. Not every file system can: no matter."""
    if _libc_fallocate:
        _libc_fallocate(descriptor, FALLOC_FL_KEEP_SIZE, ctypes.c_int64(length), ctypes.c_int64(length))


def _write_all(descriptor: int, views: list[memoryview], offset: int) -> None:
    pending = deque(views)
    while pending:
        written = os.pwritev(descriptor, list(islice(pending, BUFFERS_PER_WRITE)), offset)
        offset += written
        while pending and written >= pending[0].nbytes:
            written -= pending.popleft().nbytes
        if written:
            pending[0] = pending[0][written:]


@contextmanager
def writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise BlobUnwritten(f"cannot write {path}: {error.strerror}; check the space and rights there") from error
