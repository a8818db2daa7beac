import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.batches import msgpack

EDGES = [edge + step for edge in (-(2**15), -(2**7), -32, 0, 2**7, 2**8, 2**16) for step in (-1, 0, 1)]
integers = st.one_of(st.integers(-(2**31), 2**32 - 1), st.integers(-40, 300))


@given(st.lists(integers, max_size=40))
@example(EDGES)
@example([-(2**31), 2**32 - 1])
def test_integers_take_the_shortest_form(values: list[int]) -> None:
    assert msgpack.integers(np.array(values, np.int64)) == msgspec.msgpack.encode(values)
    assert all(msgpack.integer(value) == msgspec.msgpack.encode(value) for value in values)


@given(st.lists(st.floats(width=32), max_size=40))
def test_floats_are_written_as_64_bits_without_change(values: list[float]) -> None:
    assert msgpack.floats(np.array(values, np.float32)) == msgspec.msgpack.encode(values)
    assert all(msgpack.floating(value) == msgspec.msgpack.encode(value) for value in values)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536])
def test_headers_follow_the_length(length: int) -> None:
    flags = np.arange(length) % 3 == 0
    assert msgpack.booleans(flags) == msgspec.msgpack.encode(flags.tolist())
    assert msgpack.string("x" * length) == msgspec.msgpack.encode("x" * length)
    assert msgpack.binary_header(length) + bytes(length) == msgspec.msgpack.encode(bytes(length))
    assert msgpack.integers(np.zeros(length, np.int32)) == msgspec.msgpack.encode([0] * length)


def test_what_messagepack_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="use smaller micro-batches"):
        msgpack.binary_header(2**32)
