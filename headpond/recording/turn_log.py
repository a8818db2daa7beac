"""The append-only log of a session. A session whose process was killed is recovered from it.

A frame is a length, an xxh3 and a safetensors body. The first frame has the session's settings.
Each later one has a committed turn, the turns whose answers were seen, or a chat outside the
recording. Reading stops at the first incomplete frame.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from headpond.recording.samples import TurnDelta
from headpond.store import tensors
from headpond.store.parts import Piece, view_of
from headpond.turn import VersionSpan

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
SEEN_KEY = "seen"
LEFT_OUT_KEY = "left_out"


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
    parent: int  # The turn that the request continued; -1 for none.
    appended: bytes = b"[]"  # The new messages of the request, a JSON list.
    answer: bytes = b"{}"  # The generated message as JSON.
    record: bytes = b""  # The caller's record of the exchange. Opaque here.
    # Exact form of the parent's answer as the request repeated it; empty if it was the
    # recorded one.
    echo: bytes = b""
    # Turns whose answers the request had in another form for the first time.
    repaired: tuple[int, ...] = ()
    seen: bool = True  # Whether its caller had the answer when it was committed.
    seen_before: tuple[int, ...] = ()  # Turns whose answers were seen since the previous frame.
    request: bytes = b""  # Digest of the request. A retry is found by it.
    key: str = ""  # The request's idempotency key.
    # Requests that had arrived earlier and were not committed: their numbers and the hex
    # digits of their digests.
    beside: tuple[tuple[int, str], ...] = ()


@dataclass(kw_only=True)
class TurnLog:
    """The content of a log."""

    entries: list[LogEntry] = field(default_factory=list[LogEntry])
    frames: list[int] = field(default_factory=list[int])  # Offset of each entry's frame.
    # Turns whose answers were seen after their commit.
    seen: set[int] = field(default_factory=set[int])
    # Offset of the frame of each chat outside the recording.
    left_out: list[int] = field(default_factory=list[int])
    rows: RowsState | None = None  # The file of routed rows after the last entry.


def entry_frame(entry: LogEntry, rows: RowsState | None) -> list[Piece]:
    delta = entry.delta
    arrays = {name: getattr(delta, name) for name in DELTA_ARRAYS if getattr(delta, name) is not None}
    arrays["chunks"] = np.array(delta.chunks, np.int64).reshape(-1, 2)
    arrays |= {name: np.frombuffer(getattr(entry, name), np.uint8) for name in ENTRY_TEXTS}
    arrays |= {TRAINER_FIELD + name: values for name, values in delta.fields.items()}
    fields = {name: getattr(delta, name) for name in DELTA_FIELDS}
    more = {name: getattr(entry, name) for name in ("repaired", "seen_before", "key", "beside")}
    more |= {name: getattr(entry, name).hex() for name in ("echo", "request")} | {"unseen": not entry.seen}
    present = {name: value for name, value in more.items() if value}
    return frame({DELTA_KEY: fields, "parent": entry.parent, "rows": rows, **present}, arrays)


def read_log(bodies: Iterable[tuple[tensors.Tensors, int]], *, begin: int) -> TurnLog:
    """Read the frames behind the first one, which ends at `begin`."""
    log = TurnLog()
    for body, end in bodies:
        if SEEN_KEY in body.metadata:
            log.seen.update(orjson.loads(body.metadata[SEEN_KEY]))
        elif LEFT_OUT_KEY in body.metadata:
            log.left_out.append(begin)
        else:
            entry, log.rows = _read_entry(body)
            log.entries.append(entry)
            log.frames.append(begin)
            log.seen.update(entry.seen_before)
        begin = end
    return log


def _read_entry(body: tensors.Tensors) -> tuple[LogEntry, RowsState | None]:
    """Read one turn. Its arrays are copies, so that the log does not stay mapped."""
    metadata: dict[str, Any] = {name: orjson.loads(text) for name, text in body.metadata.items()}
    arrays: dict[str, Any] = {name: body.arrays[name].copy() for name in DELTA_ARRAYS if name in body.arrays}
    metadata[DELTA_KEY]["version_spans"] = tuple(VersionSpan(**span) for span in metadata[DELTA_KEY]["version_spans"])
    delta = TurnDelta(
        **metadata[DELTA_KEY],
        **arrays,
        fields={
            name.removeprefix(TRAINER_FIELD): values.copy()
            for name, values in body.arrays.items()
            if name.startswith(TRAINER_FIELD)
        },
        chunks=tuple((first, rows) for first, rows in body.arrays["chunks"].tolist()),
    )
    entry = LogEntry(
        delta=delta,
        parent=metadata["parent"],
        seen=not metadata.get("unseen", False),
        key=metadata.get("key", ""),
        beside=tuple((arrival, request) for arrival, request in metadata.get("beside", ())),
        echo=bytes.fromhex(metadata.get("echo", "")),
        request=bytes.fromhex(metadata.get("request", "")),
        repaired=tuple(metadata.get("repaired", ())),
        seen_before=tuple(metadata.get("seen_before", ())),
        appended=body.arrays["appended"].tobytes(),
        answer=body.arrays["answer"].tobytes(),
        record=body.arrays["record"].tobytes(),
    )
    return entry, metadata["rows"] and RowsState(**metadata["rows"])


def frame(metadata: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[Piece]:
    encoded = {name: orjson.dumps(value).decode() for name, value in metadata.items()}
    pieces, checksum = tensors.pieces(arrays, encoded, encode=orjson.dumps), xxhash.xxh3_64()
    body = [view_of(piece) for piece in pieces]
    for view in body:
        checksum.update(view)
    length = sum(view.nbytes for view in body)
    return [PREAMBLE.pack(length, checksum.intdigest()), *body, bytes(-length % ALIGNMENT)]


def frames(content: Bytes, at: int = 0) -> Iterator[tuple[tensors.Tensors, int]]:
    """Every complete frame from `at` on, and its end."""
    while at + PREAMBLE.size <= len(content):
        length, checksum = PREAMBLE.unpack_from(content.data, at)
        body = content[at + PREAMBLE.size :][:length]
        at += PREAMBLE.size + length + -length % ALIGNMENT
        if at > len(content) or xxhash.xxh3_64_intdigest(body.data) != checksum:
            return
        yield tensors.parse(body), at
