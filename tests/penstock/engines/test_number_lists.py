import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines import routed_experts as module
from penstock.engines.routed_experts import number_lists


def compact(rows: object) -> bytes:
    return json.dumps(rows, separators=(",", ":")).encode()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=st.tuples(*[st.integers(1, 5)] * 3), seed=st.integers(0, 99), block=st.integers(1, 200), data=st.data())
def test_reads_what_json_reads(shape: tuple[int, int, int], seed: int, block: int, data: st.DataObject) -> None:
    largest = data.draw(st.sampled_from([1, 10, 128, 65536]))
    rows = np.random.default_rng(seed).integers(0, largest, shape)
    first = data.draw(st.integers(0, shape[0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_CHARS", max(block, len(compact(rows[0].tolist())) + 1))
        lists = number_lists(compact(rows.tolist()))
        assert lists is not None
        values = lists.values(first)
    assert len(lists) == shape[0]
    assert np.array_equal(values, rows[first:])


@pytest.mark.parametrize(
    "text",
    [
        "[[[1,2],[3]],[[4,5],[6,7]]]",  # lengths differ
        "[[[1,2]],[[3,4],[5,6]]]",
        "[[[1,2]],[3,4]]",
        "[[[1,02]]]",
        "[[[1,]]]",
        "[[[1,-2]]]",
        "[[[1,2.5]]]",
        "[[[1,1e2]]]",
        "[[[1,null]]]",
        "[[[1, 2]]]",
        "[[[1,2]],[[3,4]],]]]",
        "[[[1,123456]]]",  # not a u16 by any means
        "[[[]]]",
        "[[[[1]]]]",
        "[]",
        "",
    ],
)
def test_leaves_everything_else_to_a_decoder(text: str) -> None:
    lists = number_lists(text.encode())
    assert lists is None or lists.values(0) is None


def test_rows_that_nobody_wants_are_looked_at_too() -> None:
    """Or what is in them would be counted as rows."""
    lists = number_lists(b"[[[6,[null]]],[[4,6]],[[7,6]]]")
    assert lists is None or lists.values(1) is None
