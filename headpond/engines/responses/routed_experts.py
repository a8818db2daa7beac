"""Routed experts in a response. They have three wire forms; only the rows that are still needed are
decoded.

Base64 is positional. So decoding starts at the first wanted row, and the characters before it are
not read. Rows are identified by their absolute token position.
"""

import binascii
import re
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray

from headpond.errors import Upstream
from headpond.turn import WIRE_DTYPES, WIRE_RANGES, CheckRoutes, RouteFormat, Routes, Rows

Text = bytes | memoryview
Count = Annotated[int, msgspec.Meta(ge=0)]

SHAPELESS_WIRE = "int32"  # Type of SGLang's bare string.
NPY_MAGIC_TEXT = pybase64.b64encode(b"\x93NUMPY")
NPY_HEADER = re.compile(
    rb"\{'descr': '[|<]([ui][1248])', 'fortran_order': False, 'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n"
)
# Zero rows come in runs (a cached prefix, a payload never captured), so a few evenly spread rows
# detect them.
SAMPLED_ROWS = 16


class Wanted(NamedTuple):
    """The rows of a response that are needed, and the number that it must have."""

    tokens: int  # Number of tokens in the response's prompt and completion.
    first: int  # First row that is needed: rows before this position are recorded already.
    until: int  # End of the rows that are needed: later ones belong to tokens that were cut.
    # First row that was requested. Engines may ignore it and send all rows.
    requested_from: int = 0

    def start(self, rows: int, stated: int | None = None) -> int:
        """Position of a payload's first row. Every token but the last has a row; some engines send
        the last row too."""
        starts = (self.requested_from, 0) if stated is None else (stated,)
        for missing in (1, 0):
            for start in starts:
                if rows == self.tokens - missing - start:
                    return start
        raise Upstream(f"routed experts: {rows} rows from {starts[-1]} on do not fit {self.tokens} tokens")


class WireObject(msgspec.Struct):
    """The form with a shape."""

    data: msgspec.Raw
    shape: tuple[Count, Count, Count]
    start: Count | None = None
    dtype: str | None = None


WIRE_OBJECT = msgspec.json.Decoder(WireObject)


class Payload(NamedTuple):
    """Base64 text, and the rows in it."""

    text: Text
    rows: int
    start: int
    format: RouteFormat
    header_bytes: int = 0  # Size of the `.npy` header before the first row.


def read_object(wire: WireObject, text: Text, wanted_rows: Wanted, route_format: RouteFormat) -> Routes | None:
    """The wanted rows of the form with a shape; `text` is the base64 of its data."""
    rows, layers, topk = wire.shape
    learned = route_format.learned(layers=layers, topk=topk, wire="uint8" if wire.dtype is None else wire.dtype)
    return _read(Payload(text=text, rows=rows, start=wanted_rows.start(rows, wire.start), format=learned), wanted_rows)


def read_string(text: Text, wanted_rows: Wanted, route_format: RouteFormat) -> Routes | None:
    """The wanted rows of a string: a `.npy` file in base64, or SGLang's bare array."""
    if bytes(text[: len(NPY_MAGIC_TEXT)]) != NPY_MAGIC_TEXT:
        return _read(_bare(text, wanted_rows, route_format), wanted_rows)
    header_bytes, rows, learned = npy_header(text, route_format)
    start = wanted_rows.start(rows)
    return _read(Payload(text=text, rows=rows, start=start, format=learned, header_bytes=header_bytes), wanted_rows)


def npy_header(text: Text, route_format: RouteFormat) -> tuple[int, int, RouteFormat]:
    """Size in bytes of the header of a base64 `.npy` file, and the rows and format that it states."""
    preamble = _decode(text[:16])
    fixed = 10 if preamble[6:7] == b"\x01" else 12
    header_bytes = fixed + int.from_bytes(preamble[8:fixed], "little")
    header = NPY_HEADER.fullmatch(_decode(text[: base64_length(header_bytes)])[fixed:header_bytes])
    if header is None:
        raise Upstream("routed experts: not the .npy header of a little-endian, C-ordered array of 3 dimensions")
    rows, layers, topk = map(int, header.groups()[1:])
    wire = np.dtype(header[1].decode()).name
    return header_bytes, rows, route_format.learned(layers=layers, topk=topk, wire=wire)


def base64_length(size: int) -> int:
    return -(-size // 3) * 4


def _bare(text: Text, wanted_rows: Wanted, route_format: RouteFormat) -> Payload:
    """The payload of SGLang's string without a shape. Layers and top-k are configured: 6 layers of
    2 experts divide as 4 of 3 do."""
    layers, topk, size = route_format.layers, route_format.topk, len(text) // 4 * 3 - bytes(text[-2:]).count(b"=")
    if layers is None or topk is None:
        raise Upstream(
            "routed experts: a bare string has no shape; set engine.hidden_layers (dense ones included) and "
            "engine.experts_per_token"
        )
    for missing in (1, 0):
        for start in (wanted_rows.requested_from, 0):
            rows = wanted_rows.tokens - missing - start
            if rows >= 0 and size == rows * layers * topk * 4:
                learned = route_format.learned(layers=layers, topk=topk, wire=SHAPELESS_WIRE)
                return Payload(text=text, rows=rows, start=start, format=learned)
    raise Upstream(
        f"routed experts: {size} bytes are not int32 rows of {layers} layers and {topk} experts for "
        f"{wanted_rows.tokens} tokens; check engine.hidden_layers and engine.experts_per_token against the model's "
        "config.json"
    )


def _read(payload: Payload, wanted_rows: Wanted) -> Routes | None:
    route_format, row_bytes = payload.format, payload.format.row_bytes
    assert route_format.wire is not None
    assert row_bytes is not None
    size = payload.header_bytes + payload.rows * row_bytes
    if len(payload.text) != base64_length(size):
        raise Upstream(f"routed experts: {len(payload.text)} characters of base64 for {size} bytes")
    first = max(payload.start, wanted_rows.first)
    skipped_bytes = payload.header_bytes + (first - payload.start) * row_bytes
    if skipped_bytes >= size:
        return None
    decoded = _decode(payload.text[skipped_bytes // 3 * 4 :])
    if len(decoded) != size - skipped_bytes // 3 * 3:
        raise Upstream("routed experts: the base64's padding does not fit its shape")
    values = np.frombuffer(decoded, WIRE_DTYPES[route_format.wire], offset=skipped_bytes % 3)
    return _routes(
        values.reshape(-1, route_format.layers or 0, route_format.topk or 0), first, wanted_rows, route_format
    )


def _routes(values: NDArray[Any], first: int, wanted_rows: Wanted, route_format: RouteFormat) -> Routes | None:
    rows = _narrowed(values, route_format)[: max(0, wanted_rows.until - first)]
    if not len(rows):
        return None
    valid = _captured(rows, route_format)
    if valid is not None and not valid.any():
        return None
    return Routes(first=first, rows=rows, valid=valid, format=route_format)


def _narrowed(values: NDArray[Any], route_format: RouteFormat) -> Rows:
    """Expert ids in the type that they are kept in. `Upstream` if an id is out of range."""
    experts = route_format.experts or 1 << route_format.dtype.itemsize * 8
    lowest, highest = WIRE_RANGES[route_format.wire or SHAPELESS_WIRE]
    if (lowest < 0 and values.min() < 0) or (highest >= experts and values.max() >= experts):
        raise Upstream(f"routed experts: an id below 0 or above {experts - 1}")
    rows = values.astype(route_format.dtype, copy=False)
    return rows if rows.flags.aligned else rows.copy()


def _captured(rows: Rows, route_format: RouteFormat) -> NDArray[np.bool_] | None:
    """A mask of the rows that were captured; None if all were. Zeros would mean expert 0 chosen
    top-k times, which no router does."""
    if route_format.check is CheckRoutes.OFF or route_format.topk == 1:
        return None
    if route_format.check is CheckRoutes.SAMPLE:
        sampled = rows[:: -max(1, len(rows) // SAMPLED_ROWS)]  # from the last row, the likeliest to be missing
        if sampled[:, 0, 0].all() or sampled.any(axis=(1, 2)).all():
            return None
    captured: NDArray[np.bool_] = np.any(rows.reshape(len(rows), -1), axis=1)
    return None if captured.all() else captured


def _decode(text: Text) -> bytes:
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Upstream("routed experts: not base64") from None
