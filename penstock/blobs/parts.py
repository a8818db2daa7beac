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

from penstock.errors import BlobUnwritten

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
    def recover(cls, path: Path, length: int) -> "Part":
        """A part with a reserved head that another process left behind: its first `length` bytes are good."""
        part = cls.__new__(cls)
        part.path, part.length = path, length
        part._head, part._tail = bytearray(HEAD), xxhash.xxh3_64()
        with path.open("rb") as file:
            file.seek(HEAD)
            for start in range(HEAD, length, BYTES_PER_READ):
                part._tail.update(file.read(min(BYTES_PER_READ, length - start)))
            if file.tell() != max(length, HEAD):
                raise BlobUnwritten(f"{path} holds {file.tell()} of the {length} bytes that its log names: start again")
        return part

    def append(self, *pieces: Piece) -> None:
        """All of them or none: a failed append leaves bytes beyond `length`, which nobody reads."""
        views = [_bytes(piece) for piece in pieces if len(piece)]
        with _writing(self.path):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self.length = _write_all(descriptor, views, self.length)
            finally:
                os.close(descriptor)
        for view in views:
            missing = HEAD - len(self._head)
            self._head += view[:missing]
            self._tail.update(view[missing:])

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


def checksum(content: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """What `Part.commit` returns for a file of these bytes."""
    state = xxhash.xxh3_64(content[HEAD:].data)
    state.update(content[:HEAD].data)
    return state.hexdigest()


def _bytes(piece: Piece) -> memoryview:
    return (piece.data if isinstance(piece, np.ndarray) else memoryview(piece)).cast("B")


def _write_all(descriptor: int, views: list[memoryview], offset: int) -> int:
    pending = deque(views)
    while pending:
        written = os.pwritev(descriptor, list(islice(pending, BUFFERS_PER_WRITE)), offset)
        offset += written
        while pending and written >= pending[0].nbytes:
            written -= pending.popleft().nbytes
        if written:
            pending[0] = pending[0][written:]
    return offset


@contextmanager
def _writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise BlobUnwritten(f"cannot write {path}: {error.strerror}; check the space and rights there") from error
