"""Responses of all dialects, forms and spellings are read as by a strict reference."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_responses import DIALECTS, FORMS, ResponseSpec, compact, request_info
from support.reference_comparison import agree, fingerprint
from support.strict_reference import ReadInputs

from headpond.engines.dialects.base import without_routes
from headpond.engines.responses.response import read_turn
from headpond.errors import Upstream
from headpond.turn import OpenSample, RouteFormat, Rows, Turn, VersionSpan

ids = st.integers(0, 200_000)
token_lists = st.lists(ids, min_size=1, max_size=12)


def drawn_rows(draw: st.DrawFn, rows: int, form: str) -> Rows:
    layers, topk = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(["uint8", "uint16", "int32"])) if form in ("object", "npy") else "int32"
    seed = draw(st.integers(0, 2**32 - 1))
    return np.random.default_rng(seed).integers(0, 6, (rows, layers, topk)).astype(dtype)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[ResponseSpec, ReadInputs]:
    """A response to a prompt that may begin with open samples, some of them prefixes of each other."""
    dialect, form = draw(st.sampled_from(DIALECTS)), draw(st.sampled_from(FORMS))
    prompt, completion = draw(token_lists), draw(st.lists(ids, max_size=6))
    tokens = len(prompt) + len(completion)
    open_samples = [
        (prompt[: draw(st.integers(1, len(prompt)))] if draw(st.booleans()) else draw(token_lists))
        for _ in range(draw(st.integers(0, 3)))
    ]
    requested_from = draw(st.integers(0, tokens - 1)) if draw(st.booleans()) else 0
    start = requested_from if draw(st.booleans()) else 0
    rows = None
    if draw(st.booleans()):
        rows = drawn_rows(draw, tokens - start - draw(st.sampled_from([0, 1])), form)
        start = min(start, tokens - len(rows))
    spec = ResponseSpec(
        prompt=prompt,
        completion=completion,
        rows=rows,
        start=start,
        dialect=dialect,
        form=form,
        named_by_id=draw(st.booleans()),
    )
    format_known = rows is not None and draw(st.booleans())
    inputs = ReadInputs(
        dialect=dialect,
        open_samples=[(held, len(held) - draw(st.sampled_from([0, 1]))) for held in open_samples],
        prompt=prompt if dialect != "vllm" else None,
        routes_from=requested_from,
        max_seq_len=draw(st.none() | st.integers(1, tokens + 1)),
        layers=rows.shape[1] if rows is not None and (form == "bare" or format_known) else None,
        topk=rows.shape[2] if rows is not None and (form == "bare" or format_known) else None,
        wire=rows.dtype.name if rows is not None and format_known else None,
        experts=draw(st.sampled_from([None, 6] if format_known else [None, 6, 300])),
    )
    return spec, inputs


@pytest.mark.parametrize("held", [[], [1], [1, 2]])
@pytest.mark.parametrize("sent", [[1, 2, 4], [1, 2], [1, 2, 3, 4], [5, 2, 3]])
def test_a_response_with_another_prompt_than_was_sent_is_another_requests(held: list[int], sent: list[int]) -> None:
    body = compact(ResponseSpec(prompt=[1, 2, 3], completion=[7], dialect="vllm").as_dict())
    assert b"prompt_token_ids" in body
    samples = [OpenSample(sequence=fingerprint(held), rows_from=0)] if held else []
    info = request_info("vllm")
    ids = np.array(sent, np.int32)
    with pytest.raises(Upstream, match="it answers another one"):
        read_turn(body, request=replace(info, prompt_ids=ids), open_samples=samples)
    same = replace(info, prompt_ids=np.array([1, 2, 3], np.int32))
    assert read_turn(body, request=same, open_samples=samples).prompt_tokens == 3


@settings(max_examples=150)
@given(exchanges())
def test_every_response_is_read_as_by_the_reference(exchange: tuple[ResponseSpec, ReadInputs]) -> None:
    spec, inputs = exchange
    agree(spec.body(), inputs)


@settings(max_examples=150)
@given(exchanges(), st.data())
def test_whitespace_and_escapes_do_not_matter(exchange: tuple[ResponseSpec, ReadInputs], data: st.DataObject) -> None:
    spec, inputs = exchange
    body = data.draw(
        st.sampled_from(
            [
                json.dumps(spec.as_dict()).encode(),
                json.dumps(spec.as_dict(), indent=2, sort_keys=True).encode(),
                spec.body().replace(b'"routed_experts"', b'"rout\\u0065d_experts"'),
                spec.body().replace(b'"prompt_token_ids"', b'"prompt_token\\u005fids"'),
                spec.body().replace(b"/", b"\\/"),
                b" " + spec.body() + b"\r\n",
            ]
        )
    )
    plain = agree(spec.body(), inputs)
    respelled = agree(body, inputs)
    assert (plain is None) == (respelled is None)


VLLM = request_info()
ROWS = np.random.default_rng(0).integers(1, 100, (20, 3, 2), dtype=np.uint8)


def rows_of(turn: Turn) -> list[int]:
    """The token positions of a turn's rows, which are checked against ROWS."""
    if turn.routes is None:
        return []
    first, until = turn.routes.first, turn.routes.first + len(turn.routes.rows)
    assert np.array_equal(turn.routes.rows, ROWS[first:until])
    return list(range(first, until))


def test_a_second_turn_adds_only_its_new_tokens_and_rows() -> None:
    first = read_turn(ResponseSpec(prompt=[1, 2, 3], completion=[4, 5], rows=ROWS[:4]).body(), request=VLLM)
    assert first.extends is None
    assert first.prompt_ids.tolist() == [1, 2, 3]
    assert first.completion_ids.tolist() == [4, 5]
    assert first.completion_logprobs.dtype == np.float32
    assert rows_of(first) == [0, 1, 2, 3]
    assert first.routes is not None
    assert json.loads(first.message or b"")["role"] == "assistant"

    sample = OpenSample(sequence=first.sequence, rows_from=4)
    spec = ResponseSpec(prompt=[1, 2, 3, 4, 5, 6, 7], completion=[8], rows=ROWS[:7])
    second = read_turn(spec.body(), request=VLLM, open_samples=[sample], route_format=first.routes.format)
    assert (second.extends, second.prefix_tokens, second.prompt_tokens, second.tokens) == (0, 5, 7, 8)
    assert second.prompt_ids.tolist() == [6, 7]
    assert rows_of(second) == [4, 5, 6]


def test_a_prompt_equal_to_an_open_sample_extends_it() -> None:
    turn = read_turn(
        ResponseSpec(prompt=[1, 2, 3], completion=[4]).body(),
        request=VLLM,
        open_samples=[OpenSample(sequence=fingerprint([1, 2, 3]), rows_from=2)],
    )
    assert turn.extends == 0
    assert turn.prompt_ids.tolist() == []


def test_an_id_with_the_same_first_digits_does_not_match() -> None:
    sample = OpenSample(sequence=fingerprint([1, 2]), rows_from=1)
    body = ResponseSpec(prompt=[1, 22, 3], completion=[4]).body()
    assert read_turn(body, request=VLLM, open_samples=[sample]).extends is None


def test_the_longest_open_sample_is_extended_and_all_matches_are_counted() -> None:
    open_samples = [
        OpenSample(sequence=fingerprint(ids), rows_from=0) for ids in ([1, 2], [1, 2, 3], [1, 9], [1, 2, 3])
    ]
    body = ResponseSpec(prompt=[1, 2, 3, 4], completion=[5]).body()
    turn = read_turn(body, request=VLLM, open_samples=open_samples)
    assert turn.extends == 1, "of equal ones the first"
    assert turn.matches == 3


def test_token_in_token_out_uses_the_prompt_of_the_request() -> None:
    request = request_info("generate", prompt_ids=np.array([1, 2, 3], np.int32))
    body = ResponseSpec(prompt=[1, 2, 3], completion=[4, 5], dialect="generate").body()
    turn = read_turn(body, request=request, open_samples=[OpenSample(sequence=fingerprint([1, 2]), rows_from=1)])
    assert turn.prompt_ids.tolist() == [3]
    assert turn.message is None
    assert turn.finish_reason == "length"
    with pytest.raises(Upstream, match="no prompt_token_ids"):
        read_turn(body, request=replace(request, prompt_ids=None))


@pytest.mark.parametrize(
    ("stated", "version"),
    [
        ("12", 12),
        (12, 12),
        ("12@r1", 12),
        ("default", None),
        (None, None),
        ("\u0663", None),
        ("9" * 5000, None),
        ("2147483648", None),
    ],
)
def test_sglang_states_the_version_of_its_weights(stated: str | int | None, version: int | None) -> None:
    response = ResponseSpec(prompt=[1], completion=[2], dialect="sglang").as_dict()
    response["choices"][0]["meta_info"]["weight_version"] = stated
    assert (
        read_turn(compact(response), request=request_info("sglang", prompt_ids=np.array([1], np.int32))).version
        == version
    )


@pytest.mark.parametrize("dialect", ["sglang", "generate"])
def test_a_response_states_which_weights_sampled_which_tokens(dialect: str) -> None:
    split = [{"version": "6", "start": 0, "end": 2}, {"version": "7@r1", "start": 2, "end": 5}]
    response = ResponseSpec(prompt=[1], completion=[2, 3, 4, 5, 6], dialect=dialect, versions=split)
    request = request_info(dialect, prompt_ids=np.array([1], np.int32))
    spans = read_turn(response.body(), request=request).version_spans
    assert spans == (VersionSpan(version=6, start=0, end=2), VersionSpan(version=7, start=2, end=5))
    cut = read_turn(response.body(), request=replace(request, max_seq_len=4)).version_spans
    assert cut == (VersionSpan(version=6, start=0, end=2), VersionSpan(version=7, start=2, end=3))
    unnamed = replace(response, versions=[{"version": "default", "start": 0, "end": 5}])
    assert read_turn(unnamed.body(), request=request).version_spans == ()


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        ([(0, 2), (3, 5)], "do not cover"),
        ([(0, 5), (5, 6)], "do not cover"),
        ([(0, 4), (4, 3), (3, 5)], "do not cover"),
        ([(1, 5)], "do not cover"),
    ],
)
def test_spans_that_do_not_cover_the_completion_are_refused(bounds: list[tuple[int, int]], why: str) -> None:
    spans = [{"version": str(6 + at), "start": start, "end": end} for at, (start, end) in enumerate(bounds)]
    response = ResponseSpec(prompt=[1], completion=[2, 3, 4, 5, 6], dialect="generate", versions=spans)
    with pytest.raises(Upstream, match=why):
        read_turn(response.body(), request=request_info("generate", prompt_ids=np.array([1], np.int32)))


def test_a_message_may_have_tool_calls_instead_of_content() -> None:
    response = ResponseSpec(prompt=[1], completion=[2]).as_dict()
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    response["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": calls}
    assert json.loads(read_turn(compact(response), request=VLLM).message or b"")["tool_calls"] == calls


def test_an_empty_completion_is_a_turn() -> None:
    turn = read_turn(ResponseSpec(prompt=[1, 2], completion=[], rows=ROWS[:1]).body(), request=VLLM)
    assert turn.completion_ids.tolist() == []
    assert rows_of(turn) == [0]


@pytest.mark.parametrize(
    ("limit", "prompt", "completion", "rows", "truncated", "overlong"),
    [
        (9, [3, 4, 5], [6, 7], [2, 3, 4, 5], False, False),
        (7, [3, 4, 5], [6, 7], [2, 3, 4, 5], False, False),
        (6, [3, 4, 5], [6], [2, 3, 4, 5], True, False),
        (5, [3, 4, 5], [], [2, 3, 4], True, False),
        (4, [3, 4], [], [2, 3], True, True),
        (3, [3], [], [2], True, True),
    ],
)
def test_truncation_cuts_rows_with_the_tokens(
    limit: int, prompt: list[int], completion: list[int], rows: list[int], truncated: bool, overlong: bool
) -> None:
    body = ResponseSpec(prompt=[1, 2, 3, 4, 5], completion=[6, 7], rows=ROWS[:6]).body()
    open_samples = [OpenSample(sequence=fingerprint([1, 2]), rows_from=2)]
    turn = read_turn(body, open_samples=open_samples, request=request_info(max_seq_len=limit))
    assert (turn.prompt_ids.tolist(), turn.completion_ids.tolist()) == (prompt, completion)
    assert len(turn.completion_logprobs) == len(completion)
    assert rows_of(turn) == rows
    assert (turn.truncated, turn.overlong_prompt) == (truncated, overlong)
    assert turn.sequence.ids_digest == fingerprint([1, 2, *prompt, *completion]).ids_digest


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("form", FORMS)
def test_without_routes_only_the_routed_experts_are_replaced(dialect: str, form: str) -> None:
    spec = ResponseSpec(prompt=[1, 2], completion=[3, 4], rows=ROWS[:3], dialect=dialect, form=form)
    request = request_info(dialect, prompt_ids=np.array([1, 2], np.int32))
    for body in (spec.body(), json.dumps(spec.as_dict(), indent=1).encode()):
        turn = read_turn(body, request=request, route_format=RouteFormat(layers=3, topk=2))
        assert turn.routes_span is not None
        start, end = turn.routes_span
        assert without_routes(body, turn) == body[:start] + b"null" + body[end:]
        expected = spec.as_dict()
        holder = expected["choices"][0]["meta_info"] if dialect == "sglang" else expected["choices"][0]
        holder["routed_experts"] = None
        assert json.loads(without_routes(body, turn)) == expected


def test_a_body_without_routed_experts_is_returned_unchanged() -> None:
    body = ResponseSpec(prompt=[1], completion=[2]).body()
    assert without_routes(body, read_turn(body, request=VLLM)) is body
