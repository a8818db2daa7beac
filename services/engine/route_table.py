"""Routed experts out of one small table: what a token's row is, and how any range of rows is sent without copying.

A sequence is divided into blocks; a block's rows are a stretch of the table, chosen by all tokens before the block, as
a prefix cache would know it. So a row is the same in every answer, and sequences that differ soon have other rows.
"""

import io
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import orjson
import pybase64
import xxhash
from numpy.typing import NDArray

from penstock.turn import Ids
from services.engine.settings import Form, RouteShape

Part = bytes | memoryview
Stretch = tuple[int, int]

BLOCK = 192
"""Tokens. Smaller blocks tell sequences apart sooner, larger ones make fewer pieces: 14 of a body of 1.3 MB."""
TABLE_ROWS = 4096
"""48 layers x top-8 make 1.5 MB: stays in the processor's cache."""


class RouteTable:
    def __init__(self, shape: RouteShape) -> None:
        self.shape = shape
        dtype = np.uint8 if shape.experts <= 256 else np.uint16
        size = TABLE_ROWS, shape.layers, shape.topk
        # A row of zeros would mean that nothing was captured.
        self._rows = np.random.default_rng(0).integers(1, shape.experts, size, dtype=dtype)

    def rows(self, ids: Ids, first: int = 0) -> NDArray[Any]:
        """Of the tokens from `first` on, the last excepted: it was never fed forward."""
        return np.concatenate([self._rows[:0], *(self._rows[slice(*stretch)] for stretch in _stretches(ids, first))])

    def written(self, form: Form, ids: Ids, first: int = 0) -> list[Part]:
        """The same as JSON, in pieces that are mostly views of the table's text."""
        stretches = list(_stretches(ids, first))
        rows = sum(end - start for start, end in stretches)
        match form:
            case Form.LISTS:
                return [b"[", *self._lists.written(stretches), b"]"]
            case Form.BARE:
                return [b'"', *self._wide.written(stretches), b'"']
            case Form.NPY:
                return [b'"', *self._narrow.written(stretches, before=self._npy_header(rows)), b'"']
            case Form.OBJECT:
                shape = b'","shape":[%d,%d,%d]' % (rows, self.shape.layers, self.shape.topk)
                kind = b',"start":%d,"dtype":"%b"}' % (first, self._rows.dtype.name.encode())
                return [b'{"data":"', *self._narrow.written(stretches), shape + kind]

    @cached_property
    def _narrow(self) -> "Base64Rows":
        return Base64Rows(self._rows)

    @cached_property
    def _wide(self) -> "Base64Rows":
        return Base64Rows(self._rows.astype(np.int32))

    @cached_property
    def _lists(self) -> "ListRows":
        return ListRows(self._rows)

    def _npy_header(self, rows: int) -> bytes:
        file = io.BytesIO()
        header = np.lib.format.header_data_from_array_1_0(self._rows)
        np.lib.format.write_array_header_1_0(file, header | {"shape": (rows, self.shape.layers, self.shape.topk)})
        return file.getvalue()


def _stretches(ids: Ids, first: int) -> Iterator[Stretch]:
    """Where in the table the rows lie, as pairs of start and end."""
    before, tokens, rows = xxhash.xxh3_64(), ids.view(np.uint8).data, len(ids) - 1
    for block in range(0, rows, BLOCK):
        if block + BLOCK > first:
            start = before.intdigest() % (TABLE_ROWS - BLOCK)
            yield start + max(0, first - block), start + min(BLOCK, rows - block)
        before.update(tokens[block * ids.itemsize : (block + BLOCK) * ids.itemsize])


class Base64Rows:
    """Rows and their base64. Three bytes are four characters, so there is a text for each byte to begin with."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self._bytes = memoryview(rows.tobytes())
        self._texts = [memoryview(pybase64.b64encode(self._bytes[phase:])) for phase in range(3)]
        self._row_bytes = rows[0].nbytes

    def written(self, stretches: Iterable[Stretch], *, before: bytes = b"") -> list[Part]:
        """The base64 of `before` and the rows: what does not fill three bytes waits for the next stretch."""
        parts: list[Part] = []
        rest = before
        for start, end in stretches:
            first, last = start * self._row_bytes, end * self._row_bytes
            whole = min(last, first + -len(rest) % 3)
            rest += self._bytes[first:whole]
            if len(rest) % 3:
                continue
            length = (last - whole) // 3
            parts += [pybase64.b64encode(rest), self._texts[whole % 3][whole // 3 * 4 :][: length * 4]]
            rest = bytes(self._bytes[whole + length * 3 : last])
        return [*parts, pybase64.b64encode(rest)]


class ListRows:
    """Rows as nested JSON lists."""

    def __init__(self, rows: NDArray[Any]) -> None:
        texts = [orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) for row in rows]
        self._text = memoryview(b",".join(texts))
        self._starts = np.cumsum([0, *(len(text) + 1 for text in texts)]).tolist()

    def written(self, stretches: Iterable[Stretch]) -> list[Part]:
        parts: list[Part] = []
        for start, end in stretches:
            parts += [b",", self._text[self._starts[start] : self._starts[end] - 1]]
        return parts[1:]
