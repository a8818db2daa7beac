"""A file that grows under a temporary name until it is complete, and is then renamed: nobody sees half of it.

No descriptor stays open between two appends, so a thousand recordings cost none, and a part found after a crash is
taken up where a log says that it was good. One writer a part.
"""

import os
from collections import deque
from collections.abc import Generator
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

# Buffers that one pwritev takes (IOV_MAX on Linux).
BUFFERS_PER_WRITE = 1024

# What recovery reads at once to compute the checksum again: bounds memory.
BYTES_PER_READ = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A length to come back to, with the checksum's state there."""

    length: int
    tail: xxhash.xxh3_64


class Part:
    def __init__(self, path: Path, *, reserve_head: bool = False) -> None:
        """Creates the file. With `reserve_head` it begins at HEAD, and `commit` is given what comes before."""
        self.path = path
        self.length = HEAD if reserve_head else 0
        self._head = bytearray(self.length)
        self._tail = xxhash.xxh3_64()
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    @classmethod
    def recover(cls, path: Path, length: int, *, reserve_head: bool = False) -> "Part":
        """A part that another process left behind, cut to the `length` that is known to be good."""
        part = cls.__new__(cls)
        part.path, part._head, part._tail = path, bytearray(HEAD if reserve_head else 0), xxhash.xxh3_64()
        if not path.is_file():
            raise BlobMissing(f"{path} is gone: what it was to become cannot be finished")
        with path.open("r+b") as file:
            part.length = file.seek(len(part._head))
            while piece := file.read(min(BYTES_PER_READ, length - part.length)):
                part._digest(memoryview(piece))
            if part.length != length:
                raise BlobCorrupt(f"{path} has only {part.length} of the {length} bytes that were written")
            file.truncate(length)
        return part

    def append(self, *pieces: Piece) -> None:
        """All of them or none."""
        views = [view.cast("B") for view in map(view_of, pieces) if view.nbytes]
        with _writing(self.path):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _write_all(descriptor, views, self.length)
            except OSError:
                os.ftruncate(descriptor, self.length)
                raise
            finally:
                os.close(descriptor)
        for view in views:
            self._digest(view)

    def tail_checksum(self) -> str:
        """Of what was appended behind the head so far."""
        return self._tail.hexdigest()

    def mark(self) -> Mark:
        return Mark(length=self.length, tail=self._tail.copy())

    def reset(self, mark: Mark) -> None:
        """Forgets what was appended since `mark` was taken."""
        self.length, self._tail = mark.length, mark.tail.copy()

    def commit(self, target: Path, *, head: bytes = b"") -> tuple[int, str]:
        """Renames to `target` and returns size and checksum. `head` fills the reserved space exactly."""
        with _writing(target):
            with self.path.open("r+b") as file:
                file.write(head)
                file.truncate(self.length)
            self.path.replace(target)
        checksum = self._tail.copy()
        checksum.update(head or bytes(self._head))
        return self.length, checksum.hexdigest()

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)

    def _digest(self, view: memoryview) -> None:
        missing = HEAD - len(self._head)
        self._head += view[:missing]
        self._tail.update(view[missing:])
        self.length += len(view)


def checksum(content: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """What `Part.commit` returns for a file of these bytes."""
    state = xxhash.xxh3_64(content[HEAD:].data)
    state.update(content[:HEAD].data)
    return state.hexdigest()


def view_of(piece: Piece) -> memoryview:
    return piece.data if isinstance(piece, np.ndarray) else memoryview(piece)


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
def _writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise BlobUnwritten(f"cannot write {path}: {error.strerror}; check the space and rights there") from error
