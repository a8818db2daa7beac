"""Cuts: the open sample that a prompt begins with, and decoys, duplicates and escapes that must not be cut."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_responses import FORMS, ResponseSpec, compact
from support.reference_comparison import agree, fingerprint
from support.strict_reference import ReadInputs

from headpond.engines.responses.cuts import Match, longest_in_ids, longest_in_text
from headpond.turn import Turn

PROMPT, COMPLETION = [5, 70, 800, 9000, 10_000], [31, 32]
ROWS = np.full((6, 2, 2), 255, np.uint8)
"""Base64 of nothing but slashes."""
ONE_SAMPLE = ReadInputs(open_samples=[(PROMPT[:3], 2)], layers=2, topk=2, wire="uint8")


def read(body: bytes, inputs: ReadInputs = ONE_SAMPLE) -> Turn:
    turn = agree(body, inputs)
    assert turn is not None
    assert turn.extends == 0
    assert turn.prompt_ids.tolist() == PROMPT[3:]
    assert turn.routes is not None
    assert turn.routes.first == 2
    return turn


def spec(**changes: Any) -> ResponseSpec:
    return ResponseSpec(**{"prompt": PROMPT, "completion": COMPLETION, "rows": ROWS} | changes)


def test_keys_inside_a_string_are_not_cut() -> None:
    read(spec(content='"routed_experts":"AAAA","prompt_token_ids":[5,70],{"routed_experts":{"data":"').body())


@pytest.mark.parametrize("form", ["object", "npy"])
@pytest.mark.parametrize("place", ["message", "usage", "stop"])
@pytest.mark.parametrize(
    "decoy",
    [
        {"routed_experts": "AAAA"},
        {"routed_experts": {"data": "A" * 32, "shape": [6, 2, 2]}},
        {"routed_experts": [[[1]]]},
        {"prompt_token_ids": PROMPT},
        {"prompt_token_ids": [*PROMPT[:3], 4, 4, 4]},
        {'x"routed_experts': "AAAA", ',"prompt_token_ids': PROMPT},
    ],
)
def test_keys_in_other_objects_are_not_cut(form: str, place: str, decoy: dict[str, Any]) -> None:
    response = spec(form=form).as_dict()
    choice = response["choices"][0]
    at = {"message": choice["message"], "usage": response["usage"], "stop": choice}[place]
    if place == "stop":
        at["stop_reason"] = decoy
    else:
        at |= decoy
    read(compact(response), ReadInputs(open_samples=ONE_SAMPLE.open_samples))


@pytest.mark.parametrize(
    ("key", "first"),
    [
        (b'"routed_experts":', b'{"data":"AAAA","shape":[1,1,3]}'),
        (b'"routed_experts":', b"null"),
        (b'"data":', b'"AAAA"'),
        (b'"shape":', b"[1,1,1]"),
        (b'"prompt_token_ids":', b"[5,70,800,1]"),
        (b'"prompt_token_ids":', b"null"),
        (b'"token_ids":', b"[1]"),
    ],
)
def test_the_last_of_duplicate_keys_counts(key: bytes, first: bytes) -> None:
    body = spec().body()
    read(body.replace(key, key + first + b"," + key, 1))
    agree(twice_behind(body, key, first), ONE_SAMPLE)


def twice_behind(body: bytes, key: bytes, last: bytes) -> bytes:
    """The body with a duplicate of the key after its value."""
    response, value = json.loads(body), None
    for holder in (response, response["choices"][0], response["choices"][0]["routed_experts"]):
        value = holder.get(json.loads(key[:-1]), value)
    text = key + compact(value)
    assert text in body
    return body.replace(text, text + b"," + key + last)


@pytest.mark.parametrize("form", FORMS)
def test_escaped_slashes_are_unescaped(form: str) -> None:
    body = spec(form=form, rows=ROWS if form in ("object", "npy") else ROWS.astype(np.int32)).body()
    inputs = ReadInputs(open_samples=ONE_SAMPLE.open_samples, layers=2, topk=2)
    read(body, inputs)
    read(body.replace(b"/", b"\\/"), inputs)


def test_the_prompt_may_come_before_the_choices_or_on_the_choice() -> None:
    response = spec().as_dict()
    prompt = response.pop("prompt_token_ids")
    read(compact({"prompt_token_ids": prompt} | response))
    sglang = spec(dialect="sglang").as_dict()
    sglang["choices"][0] = {"prompt_token_ids": PROMPT} | sglang["choices"][0]
    read(compact(sglang), replace(ONE_SAMPLE, dialect="sglang"))


def test_a_response_may_be_shorter_than_the_longest_open_sample() -> None:
    """Skipping the rows of the longest sample would go past the end of this response's rows."""
    others = [(list(range(100)), 99), (list(range(7)), 6)]
    inputs = ReadInputs(open_samples=[*ONE_SAMPLE.open_samples, *others], layers=2, topk=2, wire="uint8")
    read(spec().body(), inputs)
    bare = ReadInputs(open_samples=inputs.open_samples, layers=2, topk=2, wire="int32")
    read(spec(form="bare", rows=ROWS.astype(np.int32)).body(), bare)


@pytest.mark.parametrize("end", [b"]", b""])
@pytest.mark.parametrize(
    "behind",
    [
        *(b"", b",", b",,9", b",9000,", b",9000,,1", b",09", b",-1", b",+1", b",9.0", b",9e3", b", 9", b",9 ", b" ,9"),
        *(b',"]"', b",[1]", b",null", b",2147483647", b",2147483648", b",%d" % 10**30, b"1", b"\xff", b",9000,10000"),
    ],
)
def test_what_follows_the_known_ids_is_read_as_by_the_reference(behind: bytes, end: bytes) -> None:
    known, whole = (compact(ids)[:-1] for ids in (PROMPT[:3], PROMPT))
    for body in (spec().body(), spec(rows=None).body()):
        assert whole + b"]" in body
        for inputs in (ONE_SAMPLE, replace(ONE_SAMPLE, max_seq_len=4)):
            agree(body.replace(whole + b"]", known + behind + end), inputs)


sequences = st.lists(st.integers(0, 2**31 - 1), max_size=8)


def text(ids: list[int]) -> memoryview:
    return memoryview(json.dumps(ids, separators=(",", ":"))[1:].encode())


def plain(prompt: list[int], open_samples: list[list[int]]) -> Match | None:
    matching = [index for index, ids in enumerate(open_samples) if ids and prompt[: len(ids)] == ids]
    longest = max(matching, key=lambda index: len(open_samples[index]), default=None)
    return None if longest is None else Match(index=longest, matches=len(matching))


@settings(max_examples=300)
@given(prompt=sequences, others=st.lists(sequences, max_size=3), cuts=st.lists(st.integers(0, 8), max_size=3))
def test_the_longest_match_is_found_in_text_and_ids(
    prompt: list[int], others: list[list[int]], cuts: list[int]
) -> None:
    open_samples = [*others, *[prompt[:cut] for cut in cuts]]
    prints = [fingerprint(ids) for ids in open_samples]
    assert longest_in_text(text(prompt), prints) == plain(prompt, open_samples)
    assert longest_in_ids(np.array(prompt, np.int32), prints) == plain(prompt, open_samples)


def test_text_matches_only_up_to_its_first_space() -> None:
    open_samples = [fingerprint([1]), fingerprint([1, 2])]
    assert longest_in_text(memoryview(b"1,2,3]"), open_samples) == Match(index=1, matches=2)
    assert longest_in_text(memoryview(b"1, 2,3]"), open_samples) == Match(index=0, matches=1)
    assert longest_in_text(memoryview(b"1 ,2,3]"), open_samples) is None
