"""Files that are appended to under a temporary name, with their checksum, and published as blobs when complete.

Not safe for concurrent writers: one writer per file.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from headpond.errors import BlobCorrupt, BlobMissing
from headpond.store.atomic import UnfinishedFile, writing

Piece = bytes | bytearray | memoryview | np.ndarray[Any, Any]

# Bytes that are reserved for a header. The checksum of a file is xxh3 over its bytes from HEAD on,
# then over its first HEAD bytes, so that a header can be written last. One page keeps the following
# arrays aligned for every dtype.
HEAD = 4096

BUFFERS_PER_WRITE = 1024  # most buffers of one pwritev (IOV_MAX on Linux)
BYTES_PER_READ = 1 << 22  # bounds the memory of `recover`, which computes the checksum again

# A part beyond this many bytes gets space reserved, each time for as much again. This saves a
# quarter of the time.
RESERVED_FROM = 1 << 20
FALLOC_FL_KEEP_SIZE = 1
_libc_fallocate = getattr(ctypes.CDLL(None), "fallocate", None)  # os.posix_fallocate may write zeros

# Descriptors that parts keep open between two appends; opening and closing is a tenth of an append's time. Parts beyond
# this number open their file for every append.
KEPT_OPEN = threading.BoundedSemaphore(64)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A length to reset a part to, with the state of its checksum there."""

    length: int
    tail: xxhash.xxh3_64


class GrowingFile(UnfinishedFile):
    """A file that is appended to. No descriptor stays open between two appends, however many recordings run."""

    def __init__(self, path: Path, *, length: int = 0) -> None:
        super().__init__(path)
        self.length = length

    def append(self, *pieces: Piece) -> None:
        """Write all pieces, or none and raise BlobUnwritten."""
        self._append([view.cast("B") for view in map(view_of, pieces) if view.nbytes])

    def _append(self, views: list[memoryview]) -> None:
        end = self.length + sum(map(len, views))
        with writing(self.path):
            descriptor = self._open(end)
            try:
                write_at(descriptor, views, self.length)
            except OSError:
                os.ftruncate(descriptor, self.length)
                raise
            finally:
                self._release(descriptor)
        self.length = end

    def _open(self, end: int) -> int:
        """A descriptor to write up to `end`."""
        return os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _release(self, descriptor: int) -> None:
        os.close(descriptor)


class Part(GrowingFile):
    """A blob that is being written. With `reserve_head`, appends begin at HEAD, and `finish` writes the head.

    Its descriptor stays open between two appends, for at most KEPT_OPEN parts.
    """

    def __init__(self, path: Path, *, reserve_head: bool = False) -> None:
        super().__init__(path, length=HEAD if reserve_head else 0)
        self._head = None if reserve_head else bytearray()
        self._tail = xxhash.xxh3_64()
        self._reserved = RESERVED_FROM
        self._kept: int | None = None
        self._close_descriptor: Callable[[], object] | None = None

    @classmethod
    def recover(cls, path: Path, length: int) -> "Part":
        """Continue a part with a reserved head that another process left; its first `length` bytes are valid."""
        part = cls(path, reserve_head=True)
        if not path.is_file():
            raise BlobMissing(f"{path} is missing: the blob that it was to become cannot be completed")
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
        with contextlib.suppress(OSError):  # the bytes are thrown away
            self._close()
        super().discard()

    def tail_checksum(self) -> str:
        """Checksum of the bytes behind the head so far."""
        return self._tail.hexdigest()

    def mark(self) -> Mark:
        return Mark(length=self.length, tail=self._tail.copy())

    def reset(self, mark: Mark) -> None:
        """Undo the appends since `mark`. The part must have a reserved head."""
        self.length, self._tail = mark.length, mark.tail.copy()

    def finish(self, *, head: bytes = b"") -> tuple[int, str]:
        """Complete the file; returns size and checksum. `head` is exactly as long as the reserved space."""
        assert len(head) == (HEAD if self._head is None else 0)
        with writing(self.path):
            self._close()
            with self.path.open("r+b") as file:
                file.write(head)
                file.truncate(self.length)
        checksum = self._tail.copy()
        checksum.update(head or bytes(self._head or b""))
        return self.length, checksum.hexdigest()

    def _open(self, end: int) -> int:
        if self._kept is not None:
            descriptor = self._kept
        else:
            descriptor = super()._open(end)
            if KEPT_OPEN.acquire(blocking=False):
                self._kept = descriptor
                self._close_descriptor = weakref.finalize(self, _close_kept, descriptor)
        if end > self._reserved:
            self._reserved = 2 * end
            _reserve(descriptor, self.length, self._reserved)
        return descriptor

    def _release(self, descriptor: int) -> None:
        if descriptor != self._kept:
            super()._release(descriptor)

    def _close(self) -> None:
        close, self._kept, self._close_descriptor = self._close_descriptor, None, None
        if close:
            close()

    def _digest(self, view: memoryview) -> None:
        if self._head is not None and len(self._head) < HEAD:
            missing = HEAD - len(self._head)
            self._head += view[:missing]
            view = view[missing:]
        self._tail.update(view)


def checksum(content: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """The checksum that `Part.finish` returns for a file of these bytes."""
    state = xxhash.xxh3_64(content[HEAD:].data)
    state.update(content[:HEAD].data)
    return state.hexdigest()


def mapped(descriptor: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of an open file, read-only. The map outlives the descriptor and the file's name."""
    if not os.fstat(descriptor).st_size:  # an empty file cannot be mapped
        return np.frombuffer(b"", np.uint8)
    return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)


def view_of(piece: Piece) -> memoryview:
    return piece.data if isinstance(piece, np.ndarray) else memoryview(piece)


def _close_kept(descriptor: int) -> None:
    try:
        os.close(descriptor)
    finally:
        KEPT_OPEN.release()


def _reserve(descriptor: int, start: int, end: int) -> None:
    """Reserve the bytes from `start` to `end`, without changing the file's size. A no-op where unsupported."""
    if _libc_fallocate:
        _libc_fallocate(descriptor, FALLOC_FL_KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(end - start))


def write_at(descriptor: int, views: list[memoryview], offset: int) -> None:
    """Write all views one after the other from `offset` on."""
    if len(views) == 1 and os.pwritev(descriptor, views, offset) == views[0].nbytes:
        return
    pending = deque(views)
    while pending:
        written = os.pwritev(descriptor, list(islice(pending, BUFFERS_PER_WRITE)), offset)
        offset += written
        while pending and written >= pending[0].nbytes:
            written -= pending.popleft().nbytes
        if written:
            pending[0] = pending[0][written:]
