"""Answers as vLLM 0.31 and 0.32 and SGLang 0.5.19 write them: what is read, refused and passed on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import ValidationError
from support.engine_responses import compact
from support.real_responses import (
    COMPLETION,
    LOGPROBS,
    PROMPT,
    Json,
    sglang_chat,
    vllm_chat,
    vllm_generate,
    vllm_generate_0_31,
)

from headpond.config.engine import Engine
from headpond.engines.dialects import Prompt, load_dialect
from headpond.engines.responses import response
from headpond.engines.responses.response import RequestInfo, read_turn
from headpond.errors import Aborted, Upstream
from headpond.turn import HIT_MAX_TOKENS, Fingerprint, OpenSample, RouteFormat, Turn

ROWS = np.arange(1, 1 + 5 * 6, dtype=np.uint8).reshape(5, 3, 2)
"""One per token but the last, of 3 layers and 2 experts."""
SERVERS: dict[str, tuple[str, Callable[..., Json]]] = {
    "vllm chat": ("vllm", vllm_chat),
    "vllm generate": ("generate", vllm_generate),
    "vllm generate 0.31": ("generate", vllm_generate_0_31),
    "sglang": ("sglang", sglang_chat),
}
every_server = pytest.mark.parametrize(("dialect", "answer"), SERVERS.values(), ids=SERVERS)


def info(dialect: str, *, continues: bool = False, **engine: Any) -> RequestInfo:
    settings = Engine(dialect=dialect, hidden_layers=3, experts_per_token=2, **engine)
    prompt_ids = None if dialect == "vllm" else np.array(PROMPT, np.int32)
    return RequestInfo(dialect=load_dialect(dialect)(settings), prompt_ids=prompt_ids, continues=lambda: continues)


def read(answer: Json, dialect: str, **how: Any) -> Turn:
    request = info(dialect, **how)
    return read_turn(compact(answer), request=request, route_format=request.dialect.settings.route_format)


@every_server
def test_an_answer_is_read(dialect: str, answer: Callable[..., Json]) -> None:
    turn = read(answer(rows=ROWS), dialect)
    assert turn.completion_ids.tolist() == COMPLETION
    assert turn.completion_logprobs.tolist() == LOGPROBS
    assert turn.routes is not None
    assert np.array_equal(turn.routes.rows, ROWS)
    assert (turn.aborted, turn.finish_reason == HIT_MAX_TOKENS, turn.completion_mask) == (False, False, None)


@every_server
def test_an_aborted_answer_is_never_a_finished_turn(dialect: str, answer: Callable[..., Json]) -> None:
    body = answer(finish_reason="abort")
    with pytest.raises(Aborted, match=r"aborted the completion .*mode=keep"):
        read(body, dialect)
    turn = read(body, dialect, continues=True)
    assert turn.aborted
    assert turn.completion_ids.tolist() == COMPLETION


@every_server
def test_an_answer_that_was_aborted_before_its_first_token_is_aborted(
    dialect: str, answer: Callable[..., Json]
) -> None:
    body = answer(finish_reason="abort", completion=[], logprobs=[])
    choice = body["choices"][0]
    if dialect == "sglang":
        del choice["meta_info"]["output_token_logprobs"], choice["meta_info"]["completion_tokens"]
    else:
        choice |= {"token_ids": None, "logprobs": None}
    if dialect == "vllm":
        choice["message"]["content"] = None
    with pytest.raises(Aborted):
        read(body, dialect)
    assert read(body, dialect, continues=True).completion_ids.tolist() == []


def test_sglang_states_an_abort_in_its_meta_info_too() -> None:
    body = sglang_chat(finish_reason="abort")
    body["choices"][0]["finish_reason"] = "tool_calls"
    with pytest.raises(Aborted):
        read(body, "sglang")


@pytest.mark.parametrize("at", range(3))
def test_the_logprobs_of_generate_must_name_its_tokens(at: int) -> None:
    body = vllm_generate()
    body["choices"][0]["logprobs"]["content"][at]["token_id"] += 1
    with pytest.raises(Upstream, match="logprobs of other tokens"):
        read(body, "generate")


def test_generate_of_0_32_has_its_logprobs_behind_the_routed_experts() -> None:
    """The cut of the routed experts and of the known prompt finds them all the same: a broken full path is not used."""
    sample = OpenSample(sequence=Fingerprint.of(np.array(PROMPT[:2], np.int32)), rows_from=1)
    body = compact(vllm_generate(rows=ROWS) | {"prompt_token_ids": PROMPT})
    start = body.index(b'"routed_experts":"') + len(b'"routed_experts":"')
    turn = read_turn(body, request=info("generate"), open_samples=[sample])
    assert turn.routes is not None
    assert (turn.prompt_ids.tolist(), turn.routes.first) == (PROMPT[2:], 1)
    held = (128 + 6) // 3 * 4  # the .npy header and the first row
    noisy = body[: start + 176] + b'"' * (held - 176) + body[start + held :]
    again = read_turn(noisy, request=info("generate"), open_samples=[sample], route_format=turn.routes.format)
    assert again.routes is not None
    assert np.array_equal(again.routes.rows, ROWS[1:])


def test_a_thought_that_is_cut_off_has_no_content_and_is_a_turn() -> None:
    message = {"content": None, "reasoning": "First, I add"}
    turn = read(vllm_chat(message, finish_reason="length"), "vllm")
    assert turn.finish_reason == HIT_MAX_TOKENS
    assert orjson.loads(turn.message or b"")["reasoning"] == "First, I add"
    assert turn.completion_ids.tolist() == COMPLETION


@every_server
def test_a_token_without_a_logprob_is_masked_and_counted(dialect: str, answer: Callable[..., Json]) -> None:
    turn = read(answer(logprobs=[-0.25, -9999.0, -1.5]), dialect)
    assert turn.completion_mask is not None
    assert turn.completion_mask.tolist() == [1, 0, 1]
    assert turn.completion_logprobs.tolist() == [-0.25, 0.0, -1.5], "no ratio explodes, also of a masked token"
    assert turn.unknown_logprobs == 1


def test_ids_and_logprobs_cannot_be_switched_off() -> None:
    agents = {"include_reasoning": False, "top_logprobs": None, "logprobs": False, "return_token_ids": False}
    dialect = info("vllm").dialect
    sent = orjson.loads(dialect.request_body(Prompt(messages=[]), agents))
    assert {name: sent[name] for name in agents if name in sent} == {
        "include_reasoning": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    assert orjson.loads(dialect.request_body(Prompt(messages=[]), {"top_logprobs": 5}))["top_logprobs"] == 5


def test_generate_gets_an_agents_limit_under_the_name_that_it_reads() -> None:
    prompt = Prompt(messages=[], ids=np.array(PROMPT, np.int32))
    sent = orjson.loads(info("generate").dialect.request_body(prompt, {"max_completion_tokens": 5, "temperature": 1.0}))
    assert sent["sampling_params"] == {"temperature": 1.0, "max_tokens": 5, "logprobs": 1}


def test_rows_of_six_layers_and_two_experts_are_never_read_as_four_and_three() -> None:
    rows = np.arange(1, 1 + 5 * 12, dtype=np.int32).reshape(5, 6, 2)
    body = compact(sglang_chat(rows=rows))
    request = info("sglang")
    for wrong in (RouteFormat(layers=4, topk=2), RouteFormat(layers=6, topk=3), RouteFormat(layers=3, topk=2)):
        with pytest.raises(Upstream, match=r"check engine\.hidden_layers and engine\.experts_per_token"):
            read_turn(body, request=request, route_format=wrong)
    for unknown in (RouteFormat(layers=4), RouteFormat(topk=2), RouteFormat()):
        with pytest.raises(Upstream, match=r"engine\.hidden_layers .* and engine\.experts_per_token"):
            read_turn(body, request=request, route_format=unknown)
    turn = read_turn(body, request=request, route_format=RouteFormat(layers=6, topk=2))
    assert turn.routes is not None
    assert np.array_equal(turn.routes.rows, rows)


def test_a_shape_that_the_server_states_is_checked_too() -> None:
    body = compact(vllm_chat(rows=ROWS))
    with pytest.raises(Upstream, match="top-k is 2, but 3 is configured"):
        read_turn(body, request=info("vllm"), route_format=Engine(experts_per_token=3).route_format)


@pytest.mark.parametrize("given", [{}, {"hidden_layers": 6}, {"experts_per_token": 2}], ids=str)
def test_routed_experts_of_sglang_need_their_shape_in_the_configuration(given: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"set hidden_layers .* and experts_per_token"):
        Engine(dialect="sglang", routed_experts=True, **given)


def test_sglang_0_5_18_is_refused_and_the_minimum_named() -> None:
    body = sglang_chat(rows=ROWS)
    body["sglext"] = {"routed_experts": body["choices"][0]["meta_info"]["routed_experts"]}
    with pytest.raises(Upstream, match=r"upgrade it to 0\.5\.19 or newer"):
        read(body, "sglang")
    assert read(sglang_chat(rows=ROWS) | {"sglext": {"routed_experts": None}}, "sglang").routes is not None


def test_nested_lists_are_refused_with_the_engines_that_send_base64() -> None:
    body = vllm_chat()
    body["choices"][0]["routed_experts"] = ROWS.tolist()
    with pytest.raises(Upstream, match=r"nested lists .*0\.22\.0 or newer.*0\.5\.19 or newer"):
        read(body, "vllm")


def test_vllm_0_21_is_refused_and_the_minimum_named() -> None:
    body = vllm_chat() | {"prompt_routed_experts": ROWS[:3].tolist()}
    body["choices"][0]["routed_experts"] = ROWS[3:].tolist()
    with pytest.raises(Upstream, match=r"upgrade it to 0\.22\.0 or newer"):
        read(body, "vllm")
    assert read(vllm_chat() | {"prompt_routed_experts": None}, "vllm").routes is None
    old = vllm_chat()
    del old["choices"][0]["token_ids"]
    with pytest.raises(Upstream, match=r"vLLM must be 0\.22\.0 or newer"):
        read(old, "vllm")


@every_server
def test_routed_experts_that_were_requested_and_are_absent_are_an_error(
    dialect: str, answer: Callable[..., Json]
) -> None:
    with pytest.raises(Upstream, match=r"--enable-return-routed-experts, or set engine\.absent_routes"):
        read(answer(), dialect, routed_experts=True)
    zeros = np.zeros((5, 3, 2), np.uint8)
    with pytest.raises(Upstream, match=r"--enable-return-routed-experts"):
        read(answer(rows=zeros), dialect, routed_experts=True)
    assert read(answer(), dialect).routes_absent is False, "they were not requested"
    assert read(answer(rows=ROWS), dialect, routed_experts=True).routes_absent is False
    assert read(answer(finish_reason="abort"), dialect, routed_experts=True, continues=True).aborted


@pytest.mark.parametrize(("absent", "mask"), [("mask", [0, 0, 0]), ("drop", None)])
def test_absent_routed_experts_may_be_tolerated(absent: str, mask: list[int] | None) -> None:
    turn = read(vllm_chat(), "vllm", routed_experts=True, absent_routes=absent)
    assert turn.routes_absent
    assert (None if turn.completion_mask is None else turn.completion_mask.tolist()) == mask


def test_a_token_that_needs_no_row_is_not_absent() -> None:
    """The last token of a sequence has no row: a prompt of one token without a completion has none."""
    turn = read(vllm_chat(prompt=[1], completion=[], logprobs=[]), "vllm", routed_experts=True)
    assert not turn.routes_absent


@pytest.mark.parametrize(("reason", "hit"), [("length", True), ("stop", False), ("repetition", False)])
@every_server
def test_a_limit_of_tokens_is_told_from_other_ends(
    dialect: str, answer: Callable[..., Json], reason: str, hit: bool
) -> None:
    turn = read(answer(finish_reason=reason), dialect)
    assert (turn.finish_reason, turn.finish_reason == HIT_MAX_TOKENS, turn.truncated) == (reason, hit, False)


def test_the_sentinel_is_vllms() -> None:
    assert response.NO_LOGPROB == -9999.0
