"""A rollout's `experts` file: rows of routed experts in order of arrival, and the tokens that they belong to.

Rows are appended while the rollout runs and do not stay in memory. Sealing appends the chunk table and `routed_valid`
and writes the header into the space reserved at the start. Nothing is written twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from headpond.errors import BlobCorrupt, StageError
from headpond.store import tensors
from headpond.store.base import BlobRef, Store
from headpond.store.parts import HEAD, Part
from headpond.store.tensors import Array

# Chunks are (sample, first position, rows), and their rows follow one another in the file.
FORMAT = "headpond.experts.1"
# Chunks have a fourth number, their first row in the file: samples may have rows in common, in
# any order.
SHARED_FORMAT = "headpond.experts.2"

# A reader's filling for tokens without a row: a number, or "dummy", the valid experts (0, 1, ...,
# topk-1).
Missing = Literal[-1, 0, "dummy"]
Layers = slice | Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Rows that follow one another in the file and in a sample."""

    sample: int
    first: int  # position of its first row in the sample
    rows: int
    row: int | None = None  # its first row in the file; by default the row after the previous chunk


def seal_experts(
    store: Store,
    key: str,
    part: Part,
    *,
    chunks: Sequence[Chunk],
    routed_valid: Array,
    row: tuple[int, int],
    dtype: np.dtype[Any],
    rollout: str,
    attempt: int,
) -> BlobRef:
    """Complete the blob from `part`, which has a reserved head and the chunks' rows.

    `row` is (layers, topk). Later chunks of a sample have later positions.
    """
    rows, partial_row = divmod(part.length - HEAD, row[0] * row[1] * dtype.itemsize)
    ends = [chunk.row + chunk.rows for chunk in chunks if chunk.row is not None]
    needed = sum(chunk.rows for chunk in chunks)
    if partial_row or (rows < max(ends) if ends else rows != needed):
        raise StageError(f"part {part.path.name} has {part.length - HEAD} bytes for {needed} rows of {row} {dtype}")
    table, table_format = _table(chunks, rows)
    layout = {
        "rows": (dtype, (rows, *row)),
        "chunks": (table.dtype, table.shape),
        "routed_valid": (routed_valid.dtype, routed_valid.shape),
    }
    metadata = {"format": table_format, "rollout": rollout, "attempt": str(attempt)}
    head = tensors.header(layout, metadata, size=HEAD)
    mark = part.mark()
    try:
        part.append(table, routed_valid)
        return store.commit(part, key, head=head)
    except BaseException:
        part.reset(mark)
        raise


def _table(chunks: Sequence[Chunk], rows: int) -> tuple[Array, str]:
    """The chunk table and its format: the simple one if all rows are in the order of the chunks."""
    ordered = sorted(chunks, key=lambda chunk: chunk.row or 0)
    table = np.array([(chunk.sample, chunk.first, chunk.rows) for chunk in ordered], np.int64).reshape(-1, 3)
    placed = (np.cumsum(table[:, 2]) - table[:, 2]).tolist()
    in_order = all(chunk.row in (None, row) for chunk, row in zip(ordered, placed, strict=True))
    if in_order and table[:, 2].sum() == rows and _rises(table):
        return table, FORMAT
    wide = [(chunk.sample, chunk.first, chunk.rows, chunk.row or 0) for chunk in chunks]
    return np.array(wide, np.int64).reshape(-1, 4), SHARED_FORMAT


def _rises(table: Array) -> bool:
    """Whether the positions rise in every sample."""
    by_sample = table[np.argsort(table[:, 0], kind="stable")]
    return not ((np.diff(by_sample[:, 0]) == 0) & (np.diff(by_sample[:, 1]) < 0)).any()


class Experts:
    """An open experts file, memory-mapped."""

    def __init__(self, store: Store, ref: BlobRef, *, verify: bool = True) -> None:
        file = tensors.read(store, ref, verify=verify)
        kind = file.metadata.get("format")
        if kind not in (FORMAT, SHARED_FORMAT) or file.arrays.keys() != {"rows", "chunks", "routed_valid"}:
            raise BlobCorrupt(f"blob {ref.key} is {kind!r}, expected {FORMAT} or {SHARED_FORMAT}")
        self.rows = file.arrays["rows"]  # u8|u16[rows, layers, topk]
        # u8[T], the rollout's samples one after the other: 1 where the engine sent a row
        self.routed_valid = file.arrays["routed_valid"]
        chunks = file.arrays["chunks"].copy()  # a copy is aligned, the file's array may not be
        if chunks.shape[1:] == (3,) and kind == FORMAT:
            chunks = np.column_stack([chunks, np.cumsum(chunks[:, 2]) - chunks[:, 2]])
            complete = chunks[:, 2].sum() == len(self.rows)
        else:
            complete = chunks.shape[1:] == (4,) and (chunks[:, 2] + chunks[:, 3] <= len(self.rows)).all()
        if self.rows.ndim != 3 or not complete:
            raise BlobCorrupt(f"blob {ref.key} is not a complete experts file: its chunks do not add up to its rows")
        self._sample, self._first, self._count, self._row = chunks.T

    def read(
        self, sample: int, start: int, stop: int, out: Array, *, layers: Layers = slice(None), missing: Missing = -1
    ) -> None:
        """Copy a sample's rows of positions start..stop into `out` [stop-start, layers, topk].

        `out` has any integer type that holds the ids. `missing` fills positions without a row.
        """
        self._check_type(out.dtype, missing)
        filling = np.arange(self.rows.shape[2]) if missing == "dummy" else missing
        touched = (self._sample == sample) & (self._first < stop) & (self._first + self._count > start)
        done = start
        for chunk in np.flatnonzero(touched):  # in a sample, later chunks have later positions
            first, end = max(start, self._first[chunk]), min(stop, self._first[chunk] + self._count[chunk])
            row = self._row[chunk] + first - self._first[chunk]
            out[done - start : first - start] = filling
            out[first - start : end - start] = self.rows[row : row + end - first, layers]
            done = end
        out[done - start :] = filling

    def _check_type(self, dtype: np.dtype[Any], missing: Missing) -> None:
        signed = dtype.kind == "i"
        if missing == -1 and not signed:
            raise StageError(f"{dtype} cannot hold -1: read into int16 or int32, or pass another `missing`")
        if dtype.itemsize * 8 - signed < self.rows.dtype.itemsize * 8:
            raise StageError(f"{dtype} cannot hold expert ids of {self.rows.dtype}: read into a wider type")
