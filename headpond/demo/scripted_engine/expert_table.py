"""Routed experts from one small table, encoded as JSON without copying.

A sequence is divided into blocks. The rows of a block are a slice of the table, chosen by all tokens before the block,
as in a prefix cache: a token's row is the same in every response, and diverging sequences soon have different rows.
"""

import io
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pybase64
import xxhash
from numpy.typing import NDArray

from headpond.demo.scripted_engine.options import ExpertForm, ExpertShape
from headpond.turn import Ids

Part = bytes | memoryview
# Start and end in the table.
Slice = tuple[int, int]

# Tokens. Smaller blocks separate sequences sooner, larger ones make fewer parts: 14 for a body of 1.3 MB.
BLOCK = 192
# 1.5 MB with 48 layers x top-8: fits the processor's cache.
TABLE_ROWS = 4096


class ExpertTable:
    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape
        self.form: ExpertForm | None = shape.form
        dtype = np.uint8 if shape.experts <= 256 else np.uint16
        size = TABLE_ROWS, shape.layers, shape.topk
        # A row of zeros means "not captured".
        self._rows = np.random.default_rng(0).integers(1, shape.experts, size, dtype=dtype)

    def rows(self, ids: Ids, first: int = 0) -> NDArray[Any]:
        """Rows of the tokens from `first` on, without the last one, which was never fed forward."""
        return np.concatenate([self._rows[:0], *(self._rows[slice(*place)] for place in _slices(ids, first))])

    def encoded(self, form: ExpertForm, ids: Ids, first: int = 0) -> list[Part]:
        """The same rows as JSON, in parts that are mostly views of the table's text."""
        slices = list(_slices(ids, first))
        rows = sum(end - start for start, end in slices)
        match form:
            case "bare":
                return [b'"', *self._wide.encoded(slices), b'"']
            case "npy":
                return [b'"', *self._narrow.encoded(slices, before=_npy_header(self._rows, rows)), b'"']
            case "object":
                kind = _object_kind((rows, *self._rows.shape[1:]), first, self._rows.dtype)
                return [b'{"data":"', *self._narrow.encoded(slices), kind]

    @cached_property
    def _narrow(self) -> "Base64Rows":
        return Base64Rows(self._rows)

    @cached_property
    def _wide(self) -> "Base64Rows":
        return Base64Rows(self._rows.astype(np.int32))


class SampledRows:
    """The rows of one sequence from token `first` on, as a model routed them."""

    def __init__(self, rows: NDArray[Any], first: int, form: ExpertForm | None) -> None:
        self._rows, self._first = rows, first
        self.form: ExpertForm | None = form

    def encoded(self, form: ExpertForm, ids: Ids, first: int = 0) -> list[Part]:
        rows = self._rows[first - self._first : len(ids) - 1 - self._first]
        match form:
            case "bare":
                return [b'"', pybase64.b64encode(rows.astype(np.int32).tobytes()), b'"']
            case "npy":
                return [b'"', pybase64.b64encode(_npy_header(rows, len(rows)) + rows.tobytes()), b'"']
            case "object":
                kind = _object_kind(rows.shape, first, rows.dtype)
                return [b'{"data":"', pybase64.b64encode(rows.tobytes()), kind]


RoutedExperts = ExpertTable | SampledRows


def _npy_header(like: NDArray[Any], rows: int) -> bytes:
    file = io.BytesIO()
    header = np.lib.format.header_data_from_array_1_0(like)
    np.lib.format.write_array_header_1_0(file, header | {"shape": (rows, *like.shape[1:]), "fortran_order": False})
    return file.getvalue()


def _object_kind(shape: tuple[int, ...], first: int, dtype: np.dtype[Any]) -> bytes:
    return b'","shape":[%d,%d,%d],"start":%d,"dtype":"%b"}' % (*shape, first, dtype.name.encode())


def _slices(ids: Ids, first: int) -> Iterator[Slice]:
    """Places of the rows in the table."""
    before, tokens, rows = xxhash.xxh3_64(), ids.view(np.uint8).data, len(ids) - 1
    for block in range(0, rows, BLOCK):
        if block + BLOCK > first:
            start = before.intdigest() % (TABLE_ROWS - BLOCK)
            yield start + max(0, first - block), start + min(BLOCK, rows - block)
        before.update(tokens[block * ids.itemsize : (block + BLOCK) * ids.itemsize])


class Base64Rows:
    """Base64 of rows. Three bytes make four characters, so there is a text from each of bytes 0, 1 and 2 on."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self._bytes = memoryview(rows.tobytes())
        self._texts = [memoryview(pybase64.b64encode(self._bytes[phase:])) for phase in range(3)]
        self._row_bytes = rows[0].nbytes

    def encoded(self, slices: Iterable[Slice], *, before: bytes = b"") -> list[Part]:
        """Base64 of `before` and the rows. Bytes that do not fill a group of three are carried into the next slice."""
        parts: list[Part] = []
        rest = before
        for start, end in slices:
            first, last = start * self._row_bytes, end * self._row_bytes
            whole = min(last, first + -len(rest) % 3)
            rest += self._bytes[first:whole]
            if len(rest) % 3:
                continue
            length = (last - whole) // 3
            parts += [pybase64.b64encode(rest), self._texts[whole % 3][whole // 3 * 4 :][: length * 4]]
            rest = bytes(self._bytes[whole + length * 3 : last])
        return [*parts, pybase64.b64encode(rest)]
