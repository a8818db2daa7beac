"""The append-only log of a session: what brings it back, token by token, after its process was killed.

A frame is a length, an xxh3 and a safetensors body; the first holds the session's settings, every other one a committed
turn. Reading ends at the first frame that is not whole: the one that was being written.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from penstock.recording.samples import TurnDelta
from penstock.store import tensors
from penstock.store.experts import Chunk
from penstock.store.parts import Piece, view_of

Bytes = NDArray[np.uint8]

PREAMBLE = struct.Struct("<QQ")  # the body's length and its xxh3
ALIGNMENT = 8  # bytes; frames are padded to it, so that the arrays in a mapped log are aligned

DELTA_ARRAYS = ("prompt_ids", "completion_ids", "completion_logprobs", "completion_mask")
DELTA_FIELDS = tuple(field.name for field in fields(TurnDelta) if field.name not in (*DELTA_ARRAYS, "chunks"))
ENTRY_TEXTS = ("appended", "answer", "record")


@dataclass(frozen=True, kw_only=True)
class RowsState:
    """The file of routed rows as it is after a turn."""

    layers: int
    topk: int
    dtype: str
    length: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A committed turn."""

    delta: TurnDelta
    parent: int
    """The turn whose messages the request repeated; -1 for none."""
    appended: bytes = b"[]"
    """The request's messages behind those, a JSON list."""
    answer: bytes = b"{}"
    """The generated message as JSON."""
    record: bytes = b""
    """What the caller wants to have back; not looked at."""


def entry_frame(entry: Entry, rows: RowsState | None) -> list[Piece]:
    delta = entry.delta
    arrays = {name: getattr(delta, name) for name in DELTA_ARRAYS if getattr(delta, name) is not None}
    arrays["chunks"] = np.array([(chunk.first, chunk.rows) for chunk in delta.chunks], np.int64).reshape(-1, 2)
    arrays |= {name: np.frombuffer(getattr(entry, name), np.uint8) for name in ENTRY_TEXTS}
    words = {name: getattr(delta, name) for name in DELTA_FIELDS}
    return frame({"addition": words, "parent": entry.parent, "rows": rows}, arrays)


def read_entry(body: tensors.Tensors) -> tuple[Entry, RowsState | None]:
    """Copies: nothing keeps the log mapped."""
    words: dict[str, Any] = {name: orjson.loads(text) for name, text in body.metadata.items()}
    sample, chunks = words["addition"]["sample"], body.arrays["chunks"].tolist()
    arrays: dict[str, Any] = {name: body.arrays[name].copy() for name in DELTA_ARRAYS if name in body.arrays}
    delta = TurnDelta(
        **words["addition"],
        **arrays,
        chunks=tuple(Chunk(sample=sample, first=first, rows=rows) for first, rows in chunks),
    )
    texts = {name: body.arrays[name].tobytes() for name in ENTRY_TEXTS}
    return Entry(delta=delta, parent=words["parent"], **texts), words["rows"] and RowsState(**words["rows"])


def frame(words: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[Piece]:
    metadata = {name: orjson.dumps(value).decode() for name, value in words.items()}
    body, checksum = [view_of(piece) for piece in tensors.pieces(arrays, metadata)], xxhash.xxh3_64()
    for view in body:
        checksum.update(view)
    length = sum(view.nbytes for view in body)
    return [PREAMBLE.pack(length, checksum.intdigest()), *body, bytes(-length % ALIGNMENT)]


def frames(content: Bytes) -> Iterator[tuple[tensors.Tensors, int]]:
    """Every whole frame, and where it ends."""
    at = 0
    while at + PREAMBLE.size <= len(content):
        length, checksum = PREAMBLE.unpack_from(content.data, at)
        body = content[at + PREAMBLE.size :][:length]
        at += PREAMBLE.size + length + -length % ALIGNMENT
        if at > len(content) or xxhash.xxh3_64_intdigest(body.data) != checksum:
            return
        yield tensors.parse(body), at
