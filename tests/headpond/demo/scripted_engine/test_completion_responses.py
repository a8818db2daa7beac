"""The engine's responses, read by the library over a real socket."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_process import CHAT, GENERATE, RECORDED_FIELDS, EngineProcess, running, user
from support.engine_responses import request_info

from headpond.demo.scripted_engine.expert_table import ExpertTable
from headpond.demo.scripted_engine.options import ExpertShape
from headpond.engines.responses.response import read_turn
from headpond.renderers import bytes_chatml
from headpond.turn import CheckRoutes, Ids, OpenSample, RouteFormat, Turn

Engines = dict[tuple[str, str], EngineProcess]

TABLE = ExpertTable(ExpertShape(layers=3, topk=2, experts=16))
FORMAT = RouteFormat(layers=3, topk=2, experts=16, check=CheckRoutes.ALL)
QUESTION = "What is 12 + 3 * 4 - 5? Think it through, then end with a line `Answer: N`, where N is a whole number."
GAME = "The boxes A, B each hold a whole number from 1 to 100. Find every number. You have 8 turns."
START_FIELD = {"vllm": "routed_experts_prompt_start", "sglang": "routed_experts_start_len"}
LONG = [{"role": "system", "content": "Grüße " * 60}, user(QUESTION)]


def generate_request(prompt: Ids, **sampling: Any) -> dict[str, Any]:
    return {"model": "m", "token_ids": prompt.tolist(), "sampling_params": {"logprobs": 1, **sampling}}


def fields_of(turn: Turn) -> dict[str, Any]:
    """The fields of a turn that every dialect carries."""
    assert turn.routes is not None
    return {
        "prompt": turn.prompt_ids.tolist(),
        "completion": turn.completion_ids.tolist(),
        "logprobs": turn.completion_logprobs.tolist(),
        "rows": turn.routes.rows.tolist(),
        "first": turn.routes.first,
    }


def every_answer(engines: Engines, messages: list[Any], **sampling: Any) -> Iterator[tuple[str, Turn]]:
    """From every dialect and every form."""
    prompt = bytes_chatml.encode(messages)
    request = request_info("generate", prompt_ids=prompt)
    for (dialect, form), engine in engines.items():
        body = engine.answer(CHAT, {"messages": messages, **RECORDED_FIELDS[dialect], **sampling})
        yield f"{dialect} {form}", read_turn(body, request=request_info(dialect), route_format=FORMAT)
        body = engine.answer(GENERATE, generate_request(prompt, **sampling))
        yield f"generate {form}", read_turn(body, request=request, route_format=FORMAT)


def test_every_dialect_and_form_carries_the_same_turn(engines: Engines) -> None:
    turns = dict(every_answer(engines, LONG, seed=7))
    assert len(turns) == 9
    first, *others = map(fields_of, turns.values())
    assert all(other == first for other in others)

    turn = turns["vllm object"]
    sequence = np.concatenate([turn.prompt_ids, turn.completion_ids])
    assert turn.prompt_ids.tolist() == bytes_chatml.encode(LONG).tolist()
    assert fields_of(turn)["rows"] == TABLE.rows(sequence).tolist()
    assert {turn.finish_reason for turn in turns.values()} == {"stop"}
    assert bytes_chatml.decode_completion(turn.completion_ids) == {"role": "assistant", "content": content(turn)}
    assert content(turn).endswith(("Answer: 19", *(f"Answer: {19 + error}" for error in range(1, 10))))


def content(turn: Turn) -> str:
    return json.loads(turn.message or b"")["content"]


def test_responses_depend_only_on_the_request(engine: EngineProcess, tmp_path: Path) -> None:
    """The same bytes in any order, from any process."""
    requests = [{"messages": [user(QUESTION)], "seed": seed, **RECORDED_FIELDS["vllm"]} for seed in range(20)]
    bodies = [engine.answer(CHAT, request) for request in requests]
    assert len(set(bodies)) == 20
    assert [engine.answer(CHAT, request) for request in reversed(requests)] == bodies[::-1]
    shape = ("--layers", "3", "--topk", "2", "--experts", "16", "--form", "object")
    with running(tmp_path, *shape) as other:
        assert [other.answer(CHAT, request) for request in requests] == bodies
    with running(tmp_path, *shape, "--seed", "1") as other:
        assert other.answer(CHAT, requests[0]) != bodies[0]


def test_without_a_seed_sessions_differ(engine: EngineProcess) -> None:
    request = {"messages": [user(QUESTION)]}
    one = engine.answer(CHAT, request, X_Session_ID="r1.1")
    assert engine.answer(CHAT, request, X_Session_ID="r1.1") == one
    assert engine.answer(CHAT, request, X_Session_ID="r2.1") != one
    seeded = engine.answer(CHAT, request | {"seed": 1}, X_Session_ID="r1.1")
    assert engine.answer(CHAT, request | {"seed": 1}, X_Session_ID="r2.1") == seeded


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_every_turn_of_a_game_extends_the_previous_one(engines: Engines, dialect: str) -> None:
    """With tool calls, and only the new rows requested: together they are the rows of the whole sequence."""
    hidden, messages, turns = {"A": 37, "B": 64}, [user(GAME)], list[Turn]()
    engine, open_samples, rows = engines[dialect, "npy"], list[OpenSample](), list[np.ndarray]()
    tools = [{"type": "function", "function": {"name": "guess"}}]
    sequence = np.empty(0, np.int32)
    while not turns or turns[-1].finish_reason == "tool_calls":
        start = open_samples[0].rows_from if open_samples else 0
        request = RECORDED_FIELDS[dialect] | {
            "messages": messages,
            "tools": tools,
            "seed": len(turns),
            START_FIELD[dialect]: start,
        }
        body = engine.answer(CHAT, request)
        turn = read_turn(
            body, open_samples=open_samples, request=request_info(dialect, routes_from=start), route_format=FORMAT
        )
        assert turn.extends == (0 if open_samples else None)
        assert turn.routes is not None
        assert turn.routes.first == start
        rows.append(turn.routes.rows)
        open_samples = [OpenSample(sequence=turn.sequence, rows_from=turn.tokens - 1)]
        sequence = np.concatenate([sequence, turn.prompt_ids, turn.completion_ids])
        turns.append(turn)
        message = json.loads(turn.message or b"")
        messages += [message, *(tool_answer(call, hidden) for call in message.get("tool_calls") or [])]
    assert len(turns) > 2
    assert content(turns[-1]).endswith("DONE")
    assert np.array_equal(np.concatenate(rows), TABLE.rows(sequence))


def tool_answer(call: dict[str, Any], hidden: dict[str, int]) -> dict[str, Any]:
    guess = json.loads(call["function"]["arguments"])
    number = hidden[guess["box"]]
    result = "correct" if guess["number"] == number else "too low" if guess["number"] < number else "too high"
    return {"role": "tool", "tool_call_id": call["id"], "content": result}


def test_a_completion_is_cut_at_max_tokens(engines: Engines) -> None:
    for name, turn in every_answer(engines, LONG, max_tokens=5, seed=3):
        assert turn.finish_reason == "length", name
        assert len(turn.completion_ids) == 5
        assert bytes_chatml.MESSAGE_END not in turn.completion_ids


def test_length_latency_and_skill_follow_the_settings(tmp_path: Path) -> None:
    settings = ("--length", "uniform:40:60", "--latency", "uniform:0:0.01", "--skill", "1")
    requests = [{"messages": [user(QUESTION)], "seed": seed, **RECORDED_FIELDS["sglang"]} for seed in range(40)]
    with running(tmp_path, "--dialect", "sglang", *settings) as engine:
        choices = [json.loads(engine.answer(CHAT, request))["choices"][0] for request in requests]
    lengths = [choice["meta_info"]["completion_tokens"] for choice in choices]
    latencies = [choice["meta_info"]["e2e_latency"] for choice in choices]
    assert 40 <= min(lengths) < 45 < 55 < max(lengths) <= 60
    assert 0 < min(latencies) < 0.002 < 0.008 < max(latencies) < 0.01
    assert all(choice["message"]["content"].endswith("Answer: 19") for choice in choices)


def test_fields_that_were_not_requested_are_not_sent(engines: Engines) -> None:
    request = {"messages": [user("hi")]}
    vllm = json.loads(engines["vllm", "object"].answer(CHAT, request))
    assert vllm["prompt_token_ids"] is vllm["choices"][0]["token_ids"] is vllm["choices"][0]["logprobs"] is None
    sglang = json.loads(engines["sglang", "object"].answer(CHAT, request))["choices"][0]
    assert not {"meta_info", "prompt_token_ids", "routed_experts"} & sglang.keys()
    tokens = engines["sglang", "object"].answer(
        CHAT, request | RECORDED_FIELDS["sglang"] | {"return_routed_experts": False}
    )
    assert "routed_experts" not in json.loads(tokens)["choices"][0]["meta_info"]


VLLM_FIELDS = (
    "id object created model choices service_tier system_fingerprint usage prompt_logprobs prompt_token_ids "
    "prompt_text kv_transfer_params ec_transfer_params metrics / "
    "index message logprobs finish_reason stop_reason token_ids routed_experts / "
    "role content refusal annotations audio function_call reasoning / token logprob bytes top_logprobs"
)
GENERATE_FIELDS = (
    "request_id model created usage prompt_logprobs prompt_token_id_logprobs prompt_token_ids mm_placeholders metrics "
    "kv_transfer_params ec_transfer_params output_mode choices / "
    "index finish_reason stop_reason token_ids routed_experts sampling_mask weight_versions logprobs / "
    "token_id logprob rank top_logprobs"
)
SGLANG_FIELDS = (
    "id object created model choices usage metadata / "
    "index message logprobs finish_reason matched_stop prompt_token_ids meta_info / "
    "role content reasoning_content tool_calls / token bytes logprob top_logprobs / "
    "id finish_reason prompt_tokens weight_version weight_versions total_retractions output_token_logprobs "
    "completion_tokens cached_tokens routed_experts e2e_latency"
)


@pytest.mark.parametrize(
    ("dialect", "fields"), [("vllm", VLLM_FIELDS), ("sglang", SGLANG_FIELDS), ("generate", GENERATE_FIELDS)]
)
def test_fields_and_their_order_match_the_real_engine(engines: Engines, dialect: str, fields: str) -> None:
    if dialect == "generate":
        body = engines["vllm", "npy"].answer(GENERATE, generate_request(bytes_chatml.encode([user("hi")])))
    else:
        body = engines[dialect, "npy"].answer(CHAT, {"messages": [user("hi")], **RECORDED_FIELDS[dialect]})
    response = json.loads(body)
    choice = response["choices"][0]
    objects = [response, choice, choice.get("message"), choice["logprobs"]["content"][0], choice.get("meta_info")]
    assert " / ".join(" ".join(each) for each in objects if each) == fields
    assert body == json.dumps(response, separators=(",", ":"), ensure_ascii=False).encode(), "compact, as they print it"


def test_sglang_takes_the_prompt_as_ids(sglang: EngineProcess) -> None:
    ids = bytes_chatml.encode(LONG)
    by_messages = sglang.answer(CHAT, {"messages": LONG, "seed": 1, **RECORDED_FIELDS["sglang"]})
    by_ids = sglang.answer(
        CHAT, {"messages": [user("?")], "input_ids": ids.tolist(), "seed": 1, **RECORDED_FIELDS["sglang"]}
    )
    assert by_ids == by_messages


def test_prompt_ids_of_another_vocabulary_are_accepted(engine: EngineProcess) -> None:
    prompt = np.array([150_000, 3, 99_999], np.int32)
    request = request_info("generate", prompt_ids=prompt)
    turn = read_turn(engine.answer(GENERATE, generate_request(prompt)), request=request, route_format=FORMAT)
    assert turn.prompt_ids.tolist() == prompt.tolist()
    assert len(turn.completion_ids) > 1
