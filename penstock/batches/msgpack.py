"""MessagePack from arrays: what prime-rl's files need, each value in its shortest form as in its own encoder.

Arrays become bytes without a Python object per token. Numbers: ints from -2^31 to 2^32 - 1; every float as 64 bits.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

NIL = b"\xc0"

# An integer is a type byte and its last 4, 2 or 1 bytes, or its last byte alone: (smallest value, type byte, bytes).
INTEGERS = [
    (-(2**31), 0xD2, 4),
    (-(2**15), 0xD1, 2),
    (-(2**7), 0xD0, 1),
    (-32, None, 1),
    (128, 0xCC, 1),
    (2**8, 0xCD, 2),
    (2**16, 0xCE, 4),
]
SMALLEST = np.array([smallest for smallest, _, _ in INTEGERS])
MARKERS = np.array([marker or 0 for _, marker, _ in INTEGERS], np.uint8)
ON_WIRE = np.array([[marker is not None, *(place >= 4 - width for place in range(4))] for _, marker, width in INTEGERS])


def array_header(length: int) -> bytes:
    if length < 16:
        return bytes([0x90 | length])
    return _header(length, {2: 0xDC, 4: 0xDD})


def binary_header(length: int) -> bytes:
    return _header(length, {1: 0xC4, 2: 0xC5, 4: 0xC6})


def string(text: str) -> bytes:
    data = text.encode()
    if len(data) < 32:
        return bytes([0xA0 | len(data)]) + data
    return _header(len(data), {1: 0xD9, 2: 0xDA, 4: 0xDB}) + data


def integer(value: int) -> bytes:
    return _integers(np.array([value], np.int64)).tobytes()


def floating(value: float) -> bytes:
    return _floats(np.array([value])).tobytes()


def integers(values: Array) -> bytes:
    return array_header(values.size) + _integers(values.astype(np.int64)).tobytes()


def floats(values: Array) -> bytes:
    return array_header(values.size) + _floats(values).tobytes()


def booleans(values: Array) -> bytes:
    return array_header(values.size) + np.where(values, np.uint8(0xC3), np.uint8(0xC2)).tobytes()


def _header(length: int, markers: dict[int, int]) -> bytes:
    for width, marker in markers.items():
        if length < 1 << 8 * width:
            return bytes([marker]) + length.to_bytes(width, "big")
    raise ValueError(f"MessagePack holds no {length} bytes or values in one piece: use smaller micro-batches")


def _floats(values: Array) -> Array:
    cells = np.empty(values.size, np.dtype([("type", "u1"), ("value", ">f8")]))
    cells["type"] = 0xCB
    cells["value"] = values
    return cells


def _integers(values: Array) -> Array:
    classes = np.searchsorted(SMALLEST, values, side="right") - 1
    cells = np.empty((values.size, 5), np.uint8)
    cells[:, 0] = MARKERS[classes]
    cells[:, 1:] = values.astype(">u4").view(np.uint8).reshape(-1, 4)
    return cells[ON_WIRE.take(classes, axis=0)]
