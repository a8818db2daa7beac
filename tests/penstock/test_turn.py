"""A token sequence is recognised at the start of a prompt, as text and as an array."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_comparison import fingerprint

from penstock.engines.cuts import Match, longest_in_ids, longest_in_text
from penstock.turn import Fingerprint

sequences = st.lists(st.integers(0, 2**31 - 1), max_size=8)


def text(ids: list[int]) -> memoryview:
    return memoryview(json.dumps(ids, separators=(",", ":"))[1:].encode())


def plain(prompt: list[int], known: list[list[int]]) -> Match | None:
    matching = [index for index, ids in enumerate(known) if ids and prompt[: len(ids)] == ids]
    longest = max(matching, key=lambda index: len(known[index]), default=None)
    return None if longest is None else Match(index=longest, matches=len(matching))


@settings(max_examples=300)
@given(prompt=sequences, others=st.lists(sequences, max_size=3), cuts=st.lists(st.integers(0, 8), max_size=3))
def test_the_longest_of_the_known_sequences(prompt: list[int], others: list[list[int]], cuts: list[int]) -> None:
    known = [*others, *[prompt[:cut] for cut in cuts]]
    prints = [fingerprint(ids) for ids in known]
    assert longest_in_text(text(prompt), prints) == plain(prompt, known)
    assert longest_in_ids(np.array(prompt, np.int32), prints) == plain(prompt, known)


@given(parts=st.lists(sequences, max_size=4))
def test_extending_is_the_same_as_beginning_anew(parts: list[list[int]]) -> None:
    extended = Fingerprint().extended(*[np.array(part, np.int32) for part in parts])
    whole = fingerprint([token for part in parts for token in part])
    assert (extended.tokens, extended.text_bytes) == (whole.tokens, whole.text_bytes)
    assert (extended.text_digest, extended.ids_digest) == (whole.text_digest, whole.ids_digest)


def test_extending_leaves_the_shorter_one_alone() -> None:
    short = fingerprint([1, 2])
    before = short.text_digest
    short.extended(np.array([3], np.int32))
    assert short.text_digest == before


def test_text_with_spaces_is_recognised_as_far_as_it_has_none() -> None:
    known = [fingerprint([1]), fingerprint([1, 2])]
    assert longest_in_text(memoryview(b"1,2,3]"), known) == Match(index=1, matches=2)
    assert longest_in_text(memoryview(b"1, 2,3]"), known) == Match(index=0, matches=1)
    assert longest_in_text(memoryview(b"1 ,2,3]"), known) is None
