"""Nested lists of small numbers, `[[[3,17],[0,5]],...]`, read from their text by whole arrays.

A Python integer for every number would hold the interpreter's lock for seconds: here most of the work is done without
it, a block of rows at a time. Whatever is not compact and regular is left to a JSON decoder, which says what is wrong.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Chars = NDArray[np.uint8]

MAX_DIGITS = 5
"""Of a u16."""
BLOCK_CHARS = 1 << 18
"""Worked on at once: ten arrays of this size stay in the cache, and no step holds the lock for long."""


@dataclass(frozen=True, kw_only=True)
class NumberLists:
    """A list of rows. `layers` lists of `topk` numbers are a row; only the first was looked at so far."""

    chars: Chars
    """Without the outermost opening bracket; the closing one stands where the others have a comma."""
    ends: NDArray[np.int64]
    """Behind each row and its comma, if every row is like the first."""
    layers: int
    topk: int

    def __len__(self) -> int:
        return len(self.ends)

    def values(self, first: int) -> NDArray[np.int32] | None:
        """`[rows, layers, topk]` from row `first` on; None unless all, those before too, are alike and compact."""
        found = np.empty((max(0, len(self) - first), self.layers, self.topk), np.int32)
        row = done = 0
        while row < len(self):
            until = max(row + 1, int(np.searchsorted(self.ends, done + BLOCK_CHARS, side="right")))
            until = min(until, first) if row < first else until
            block = self._block(done, int(self.ends[until - 1]), until - row)
            if block is None:
                return None
            if row >= first:
                numbers = block.numbers()
                if numbers is None:
                    return None
                found[row - first : until - first] = numbers.reshape(-1, self.layers, self.topk)
            row, done = until, int(self.ends[until - 1])
        return found

    def _block(self, start: int, end: int, rows: int) -> "_Block | None":
        """None unless it is JSON, and as regular as the first row."""
        chars = self.chars[start:end]
        digits = chars - ord("0")
        is_digit = digits < 10
        skeleton, others = self._skeleton, chars[~is_digit]
        if end == len(self.chars):
            others[-1] = ord(",")
        if len(others) != rows * len(skeleton) or not (others.reshape(rows, -1) == skeleton).all():
            return None
        last = is_digit[:-1] & ~is_digit[1:]
        leading_zero = (digits[1:-1] == 0) & ~is_digit[:-2] & is_digit[2:]
        if np.count_nonzero(last) != rows * self.layers * self.topk or leading_zero.any():
            return None
        return _Block(digits=digits, is_digit=is_digit, last=last)

    @cached_property
    def _skeleton(self) -> Chars:
        """What is left of a row without its digits."""
        layer = b"[" + b"," * (self.topk - 1) + b"]"
        return np.frombuffer(b"[" + b",".join([layer] * self.layers) + b"],", np.uint8)


@dataclass(frozen=True, kw_only=True)
class _Block:
    digits: Chars
    is_digit: NDArray[np.bool_]
    last: NDArray[np.bool_]
    """The last digit of each number."""

    def numbers(self) -> NDArray[np.int32] | None:
        """None when one has more than MAX_DIGITS."""
        place = np.flatnonzero(self.last)
        numbers = self.digits[place].astype(np.int32)
        more = self.is_digit[place - 1]
        for power in range(1, MAX_DIGITS):
            if not more.any():
                break
            numbers += np.where(more, self.digits[place - power], 0) * np.int32(10**power)
            more &= self.is_digit[place - power - 1]
        return None if more.any() else numbers


def number_lists(text: bytes | memoryview) -> NumberLists | None:
    """None when `text` is not at first sight a compact list of rows."""
    start = bytes(text[:BLOCK_CHARS])
    end_of_first = start.find(b"]]")
    if not start.startswith(b"[[[") or end_of_first < 0 or bytes(text[-3:]) != b"]]]":
        return None
    first = start[1 : end_of_first + 2]
    layers, topk = first.count(b"[") - 1, first[: first.index(b"]")].count(b",") + 1
    chars = np.frombuffer(text, np.uint8)[1:]
    closing = chars == ord("]")
    ends = np.flatnonzero(closing[:-2] & closing[1:-1] & (chars[2:] == ord(","))) + 3
    return NumberLists(chars=chars, ends=np.append(ends, len(chars)), layers=layers, topk=topk)
