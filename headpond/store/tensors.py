"""The safetensors format: named arrays and string metadata in one blob, read as views of the memory
map.

The `safetensors` package builds the whole file in memory, and copies when it reads. Here arrays are
written without a copy, and a header can be written last. The package's reader opens every file.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headpond.errors import BlobCorrupt
from headpond.store.base import BlobRef, Store
from headpond.store.parts import Piece

Array = np.ndarray[Any, Any]

DTYPES = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
        "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
    }.items()
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}

PREFIX = 8  # bytes before the header: its length, little-endian


@dataclass(frozen=True, kw_only=True)
class Tensors:
    arrays: dict[str, Array]
    metadata: dict[str, str]


def write(store: Store, key: str, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> BlobRef:
    return store.put(key, pieces(arrays, metadata))


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def pieces(
    arrays: Mapping[str, Array], metadata: Mapping[str, str], *, encode: Callable[[Mapping[str, Any]], bytes] = _json
) -> list[Piece]:
    """The bytes of the file. The order of `arrays` does not matter: wide dtypes come first, so all
    are aligned.

    `encode` makes compact JSON. orjson is faster, but readers of blobs need only NumPy and xxhash.
    """
    ordered = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    layout = {name: (arrays[name].dtype, arrays[name].shape) for name in ordered}
    return [header(layout, metadata, encode=encode), *(np.ascontiguousarray(arrays[name]) for name in ordered)]


def to_bytes(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """The whole file in memory. Use it for small files."""
    return b"".join(piece.tobytes() if isinstance(piece, np.ndarray) else piece for piece in pieces(arrays, metadata))


def read(store: Store, ref: BlobRef, *, verify: bool = True) -> Tensors:
    content = store.open(ref, verify=verify)
    try:
        return parse(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BlobCorrupt(f"blob {ref.key} is not a safetensors file: {error}") from error


def header(
    layout: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    metadata: Mapping[str, str],
    *,
    size: int = 0,
    encode: Callable[[Mapping[str, Any]], bytes] = _json,
) -> bytes:
    """Length and JSON of the header, padded with spaces to `size` or to the next 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, (dtype, shape) in layout.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = encode(entries)
    length = max(size - PREFIX, -len(text) % 8 + len(text))
    if size and length > size - PREFIX:
        raise ValueError(f"a header of {len(text)} bytes does not fit into the {size - PREFIX} reserved for it")
    return length.to_bytes(PREFIX, "little") + text.ljust(length)


def parse(content: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensors:
    """Views of `content`. Raises ValueError, KeyError, TypeError or AttributeError if it is not a safetensors file."""
    length = int.from_bytes(content[:PREFIX].tobytes(), "little")
    start = PREFIX + length
    if start > content.size or content.size < PREFIX:
        raise ValueError(f"its header has {length} bytes, the whole file {content.size}")
    entries: dict[str, Any] = json.loads(content[PREFIX:start].tobytes())
    metadata: dict[str, str] = entries.pop("__metadata__", {})
    arrays: dict[str, Array] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = _expect_start(name, entry["data_offsets"], end)
        view = content[start + begin : start + end].view(DTYPES[entry["dtype"]])
        arrays[name] = view.reshape(entry["shape"])
        if list(arrays[name].shape) != entry["shape"]:
            raise ValueError(f"{name} has shape {entry['shape']}")
    if start + end != content.size:
        raise ValueError(f"its arrays have {end} bytes, the file has {content.size - start} behind its header")
    return Tensors(arrays=arrays, metadata=metadata)


def _expect_start(name: str, offsets: list[int], expected: int) -> tuple[int, int]:
    begin, end = offsets
    if begin != expected or end < begin:
        raise ValueError(f"{name} lies at {begin}:{end}, expected at {expected}")
    return begin, end
