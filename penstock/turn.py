"""What is kept of a token sequence to recognise it at the start of a later prompt, without keeping the sequence.

A prompt arrives as text (`1,22,333` inside the engine's JSON) or as an array; either is recognised by length and
xxh3-128, in one pass however many sequences are offered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

Ids = NDArray[np.int32]


def ids_text(ids: Ids) -> bytes:
    """The ids as engines print them, without the brackets."""
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


class Fingerprint:
    """A token sequence's length and hashes. Immutable: `extended` makes another one."""

    __slots__ = ("_ids", "_text", "text_bytes", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.text_bytes = 0
        """Length of `ids_text`."""
        self._text = xxhash.xxh3_128()
        self._ids = xxhash.xxh3_128()

    @classmethod
    def of(cls, ids: Ids) -> Self:
        return cls().extended(ids)

    def extended(self, *parts: Ids) -> Self:
        """The fingerprint of this sequence followed by `parts`."""
        longer = type(self)()
        longer.tokens, longer.text_bytes = self.tokens, self.text_bytes
        longer._text, longer._ids = self._text.copy(), self._ids.copy()
        for ids in parts:
            longer._append(ids)
        return longer

    def _append(self, ids: Ids) -> None:
        if not len(ids):
            return
        text = ids_text(ids)
        if self.tokens:
            self._text.update(b",")
            self.text_bytes += 1
        self._text.update(text)
        self._ids.update(ids.data)
        self.text_bytes += len(text)
        self.tokens += len(ids)

    @property
    def text_digest(self) -> int:
        return self._text.intdigest()

    @property
    def ids_digest(self) -> int:
        return self._ids.intdigest()


@dataclass(frozen=True, kw_only=True)
class Match:
    """Which of the offered sequences a prompt begins with."""

    index: int
    """The longest one's place in what was offered; of equal ones, the first."""
    matches: int
    """How many matched: more than one is worth counting."""


def longest_in_text(text: memoryview, known: Sequence[Fingerprint]) -> Match | None:
    """`text` begins with the ids of a compact JSON list, behind its bracket; ids with spaces are not recognised."""
    return _longest(
        text,
        [
            (print_.text_bytes, index, print_.text_digest)
            for index, print_ in enumerate(known)
            if print_.tokens and bytes(text[print_.text_bytes : print_.text_bytes + 1]) in (b",", b"]")
        ],
    )


def longest_in_ids(ids: Ids, known: Sequence[Fingerprint]) -> Match | None:
    return _longest(
        ids.view(np.uint8).data,
        [
            (print_.tokens * ids.itemsize, index, print_.ids_digest)
            for index, print_ in enumerate(known)
            if print_.tokens
        ],
    )


def _longest(data: memoryview, candidates: list[tuple[int, int, int]]) -> Match | None:
    """Candidates are (length in bytes, index, digest of the first so many bytes)."""
    hashed, done, found = xxhash.xxh3_128(), 0, list[int]()
    for length, index, digest in sorted(candidates, key=lambda candidate: (candidate[0], -candidate[1])):
        if length > len(data):
            break
        hashed.update(data[done:length])
        done = length
        if hashed.intdigest() == digest:
            found.append(index)
    return Match(index=found[-1], matches=len(found)) if found else None
