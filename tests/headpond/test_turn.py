"""Fingerprints of token sequences."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.reference_comparison import fingerprint

from headpond.turn import Fingerprint

sequences = st.lists(st.integers(0, 2**31 - 1), max_size=8)


@given(parts=st.lists(sequences, max_size=4))
def test_an_extended_fingerprint_equals_that_of_the_whole_sequence(parts: list[list[int]]) -> None:
    extended = Fingerprint().extended(*[np.array(part, np.int32) for part in parts])
    whole = fingerprint([token for part in parts for token in part])
    assert (extended.tokens, extended.text_bytes) == (whole.tokens, whole.text_bytes)
    assert (extended.text_digest, extended.ids_digest) == (whole.text_digest, whole.ids_digest)


def test_extending_does_not_change_the_original() -> None:
    short = fingerprint([1, 2])
    before = short.text_digest
    short.extended(np.array([3], np.int32))
    assert short.text_digest == before
