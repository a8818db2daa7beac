"""The append-only log of a session, from which it is recovered after its process was killed.

A frame is a length, an xxh3 and a safetensors body. The first frame has the session's settings, each later one a
committed turn. Reading stops at the first incomplete frame, which was being written.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from penstock.recording.samples import TurnDelta
from penstock.store import tensors
from penstock.store.experts import Chunk
from penstock.store.parts import Piece, view_of
from penstock.turn import VersionSpan

Bytes = NDArray[np.uint8]

PREAMBLE = struct.Struct("<QQ")  # length and xxh3 of the body
ALIGNMENT = 8  # bytes; frames are padded so that the arrays of a mapped log are aligned

DELTA_KEY = "addition"  # name of the delta's fields on disk; fixed, or logs of earlier releases could not be recovered
DELTA_ARRAYS = (
    "prompt_ids",
    "completion_ids",
    "completion_logprobs",
    "completion_mask",
    "support_ids",
    "support_lengths",
)
ARRAY_FIELDS = (*DELTA_ARRAYS, "chunks", "fields")
DELTA_FIELDS = tuple(field.name for field in dataclass_fields(TurnDelta) if field.name not in ARRAY_FIELDS)
TRAINER_FIELD = "field."  # prefix of the arrays that hold `TurnDelta.fields`
ENTRY_TEXTS = ("appended", "answer", "record")


@dataclass(frozen=True, kw_only=True)
class RowsState:
    """The file of routed rows after a turn."""

    layers: int
    topk: int
    dtype: str
    length: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """A committed turn."""

    delta: TurnDelta
    parent: int
    """The turn that the request continued; -1 for none."""
    appended: bytes = b"[]"
    """The new messages of the request, a JSON list."""
    answer: bytes = b"{}"
    """The generated message as JSON."""
    record: bytes = b""
    """The caller's record of the exchange. Opaque here."""


def entry_frame(entry: LogEntry, rows: RowsState | None) -> list[Piece]:
    delta = entry.delta
    arrays = {name: getattr(delta, name) for name in DELTA_ARRAYS if getattr(delta, name) is not None}
    arrays["chunks"] = np.array([(chunk.first, chunk.rows) for chunk in delta.chunks], np.int64).reshape(-1, 2)
    arrays |= {name: np.frombuffer(getattr(entry, name), np.uint8) for name in ENTRY_TEXTS}
    arrays |= {TRAINER_FIELD + name: values for name, values in delta.fields.items()}
    fields = {name: getattr(delta, name) for name in DELTA_FIELDS}
    return frame({DELTA_KEY: fields, "parent": entry.parent, "rows": rows}, arrays)


def read_entry(body: tensors.Tensors) -> tuple[LogEntry, RowsState | None]:
    """Arrays are copies, so that the log does not stay mapped."""
    metadata: dict[str, Any] = {name: orjson.loads(text) for name, text in body.metadata.items()}
    sample, chunks = metadata[DELTA_KEY]["sample"], body.arrays["chunks"].tolist()
    arrays: dict[str, Any] = {name: body.arrays[name].copy() for name in DELTA_ARRAYS if name in body.arrays}
    metadata[DELTA_KEY]["version_spans"] = tuple(
        VersionSpan(**span) for span in metadata[DELTA_KEY].get("version_spans", ())
    )
    delta = TurnDelta(
        **metadata[DELTA_KEY],
        **arrays,
        fields={
            name.removeprefix(TRAINER_FIELD): values.copy()
            for name, values in body.arrays.items()
            if name.startswith(TRAINER_FIELD)
        },
        chunks=tuple(Chunk(sample=sample, first=first, rows=rows) for first, rows in chunks),
    )
    texts = {name: body.arrays[name].tobytes() for name in ENTRY_TEXTS}
    return LogEntry(delta=delta, parent=metadata["parent"], **texts), metadata["rows"] and RowsState(**metadata["rows"])


def frame(metadata: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[Piece]:
    encoded = {name: orjson.dumps(value).decode() for name, value in metadata.items()}
    body, checksum = [view_of(piece) for piece in tensors.pieces(arrays, encoded)], xxhash.xxh3_64()
    for view in body:
        checksum.update(view)
    length = sum(view.nbytes for view in body)
    return [PREAMBLE.pack(length, checksum.intdigest()), *body, bytes(-length % ALIGNMENT)]


def frames(content: Bytes) -> Iterator[tuple[tensors.Tensors, int]]:
    """Every complete frame, and its end."""
    at = 0
    while at + PREAMBLE.size <= len(content):
        length, checksum = PREAMBLE.unpack_from(content.data, at)
        body = content[at + PREAMBLE.size :][:length]
        at += PREAMBLE.size + length + -length % ALIGNMENT
        if at > len(content) or xxhash.xxh3_64_intdigest(body.data) != checksum:
            return
        yield tensors.parse(body), at
