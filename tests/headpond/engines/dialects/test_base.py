"""Token ids from JSON to an array, directly and by type."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headpond.engines.dialects.base import compact_ids, read_ids
from headpond.errors import Upstream


@given(ids=st.lists(st.integers(0, 2**31 - 1) | st.just(0), max_size=20))
def test_ids_are_read_with_and_without_spaces(ids: list[int]) -> None:
    compact, spaced = json.dumps(ids, separators=(",", ":")).encode(), json.dumps(ids, indent=1).encode()
    quick = compact_ids(compact)
    assert quick is not None
    assert quick.dtype == np.int32
    assert quick.tolist() == ids
    assert read_ids(spaced, "token_ids").tolist() == ids


@pytest.mark.parametrize(
    "text", ["[-1]", "[1.0]", "[1e3]", "[[1]]", "[true]", "[2147483648]", f"[{10**40}]", "7", "{}", '"1"']
)
def test_other_values_than_ids_are_rejected_with_the_name_of_the_field(text: str) -> None:
    assert compact_ids(text.encode()) is None
    with pytest.raises(Upstream, match="of token_ids"):
        read_ids(text.encode(), "token_ids")
