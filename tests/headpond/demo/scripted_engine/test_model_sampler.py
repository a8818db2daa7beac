"""An engine that samples from a model: true logprobs and experts, also of completions that new weights cross."""

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_process import (
    CHAT,
    GENERATE,
    RECORDED_FIELDS,
    EngineProcess,
    control,
    in_flight,
    running,
    sent,
    update_vllm,
    user,
    write_weights,
)
from support.engine_responses import request_info
from support.played_steps import windows_of

from headpond.demo import tiny_moe
from headpond.demo.scripted_engine import model_sampler
from headpond.demo.scripted_engine.completion_requests import read_generate
from headpond.demo.scripted_engine.draws import Distribution
from headpond.demo.scripted_engine.generation import draws_of
from headpond.demo.scripted_engine.model_sampler import ModelSampler, next_tokens
from headpond.demo.scripted_engine.options import EngineSettings, ExpertShape, FailureRates
from headpond.demo.scripted_engine.served_weights import Weights
from headpond.demo.tiny_moe import Array
from headpond.engines.responses.response import read_turn
from headpond.renderers import bytes_chatml
from headpond.turn import CheckRoutes, RouteFormat, Turn

FORMAT = RouteFormat(layers=tiny_moe.LAYERS, topk=tiny_moe.TOPK, experts=tiny_moe.EXPERTS, check=CheckRoutes.ALL)
MESSAGES = [user("copy 31")]
PROMPT = bytes_chatml.encode(MESSAGES)
TOLERANCE = 1e-5
SEED = 5


def generate(prompt: Array = PROMPT, **sampling: Any) -> dict[str, Any]:
    return {"token_ids": prompt.tolist(), "sampling_params": {"logprobs": 1, "seed": 1, "max_tokens": 8, **sampling}}


def expected_logprobs(
    weights: tiny_moe.Weights, ids: Array, first: int, rows: Array, temperature: float = 1.0
) -> Array:
    """Of the tokens from `first` on, with the rows of all tokens but the last."""
    at = np.arange(first, len(ids))
    passed = tiny_moe.forward(weights, windows_of(ids)[at], rows[at - 1].astype(np.int64))
    logs = tiny_moe.log_softmax(tiny_moe.logits(weights, passed.hidden) / temperature)
    return np.take_along_axis(logs, ids[at][:, None], axis=1)[:, 0]


def endless(seed: int) -> tiny_moe.Weights:
    """A model that never ends its message."""
    weights = tiny_moe.initial_weights(seed)
    weights["output.bias"][tiny_moe.MESSAGE_END] = -100.0
    return weights


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with running(tmp_path_factory.mktemp("model"), "--model", "tiny-moe", "--seed", str(SEED)) as engine:
        yield engine


def recorded(body: bytes, dialect: str, **fields: Any) -> Turn:
    turn = read_turn(body, request=request_info(dialect, **fields), route_format=FORMAT)
    assert turn.routes is not None
    return turn


def test_logprobs_and_experts_are_those_of_the_model(engine: EngineProcess) -> None:
    weights = tiny_moe.initial_weights(SEED)
    for temperature in (1.0, 0.7):
        body = engine.answer(GENERATE, generate(temperature=temperature))
        turn = recorded(body, "generate", prompt_ids=PROMPT)
        assert turn.routes is not None
        ids = np.concatenate([PROMPT, turn.completion_ids])
        assert len(turn.routes.rows) == len(ids) - 1
        free = tiny_moe.forward(weights, windows_of(ids)[1:-1])
        assert np.array_equal(turn.routes.rows, free.routes), "every token's experts are those that the router chooses"
        expected = expected_logprobs(weights, ids, len(PROMPT), turn.routes.rows, temperature)
        assert np.abs(turn.completion_logprobs - expected).max() < TOLERANCE


def test_chat_and_generate_carry_the_same_turn(engine: EngineProcess) -> None:
    chat = {"messages": MESSAGES, "seed": 1, "max_tokens": 8, **RECORDED_FIELDS["vllm"]}
    body = engine.answer(CHAT, chat)
    turns = [recorded(body, "vllm"), recorded(engine.answer(GENERATE, generate()), "generate", prompt_ids=PROMPT)]
    for column in ("completion_ids", "completion_logprobs"):
        assert np.array_equal(*(getattr(turn, column) for turn in turns))
    assert np.array_equal(*(turn.routes.rows for turn in turns if turn.routes))
    message = json.loads(body)["choices"][0]["message"]
    assert message["content"] == bytes_chatml.decode(turns[0].completion_ids)


def test_sglang_sends_rows_as_int32_and_raw_logprobs_are_those_before_the_temperature(tmp_path: Path) -> None:
    flags = ("--model", "tiny-moe", "--dialect", "sglang", "--logprobs-mode", "raw_logprobs")
    with running(tmp_path, *flags) as engine:
        request = {"messages": MESSAGES, "seed": 1, "max_tokens": 8, "temperature": 0.5, **RECORDED_FIELDS["sglang"]}
        turn = recorded(engine.answer(CHAT, request), "sglang")
    assert turn.routes is not None
    ids = np.concatenate([PROMPT, turn.completion_ids])
    expected = expected_logprobs(tiny_moe.initial_weights(0), ids, len(PROMPT), turn.routes.rows)
    assert np.abs(turn.completion_logprobs - expected).max() < TOLERANCE


def test_tokens_are_drawn_with_their_probabilities() -> None:
    weights, draws = tiny_moe.initial_weights(1), 4_000
    window = windows_of(PROMPT)[-1:]
    uniforms = (np.arange(draws) + 0.5) / draws
    for temperature in (1.0, 0.5):
        temperatures = np.full(draws, temperature)
        _, tokens, logprobs, _ = next_tokens(weights, [window] * draws, temperatures, uniforms, False)
        logits = tiny_moe.logits(weights, tiny_moe.forward(weights, window).hidden)
        expected = np.exp(tiny_moe.log_softmax(logits / temperature))[0]
        shares = np.bincount(tokens, minlength=tiny_moe.VOCABULARY) / draws
        assert np.abs(shares - expected).max() <= 1.5 / draws
        assert np.abs(np.exp(logprobs) - expected[tokens]).max() < TOLERANCE


def test_with_a_top_k_the_response_has_the_tokens_that_were_left(engine: EngineProcess) -> None:
    """Their probabilities add up to 1, also beside a completion without one."""
    weights, kept = tiny_moe.initial_weights(SEED), 3
    plain = sent(engine, GENERATE, generate())
    choice = json.loads(engine.answer(GENERATE, generate(top_k=kept, temperature=0.7)))["choices"][0]
    assert plain.result(60)["choices"][0]["sampling_mask"] is None
    ids = np.concatenate([PROMPT, np.array(choice["token_ids"], np.int32)])
    at = np.arange(len(PROMPT), len(ids))
    logits = tiny_moe.logits(weights, tiny_moe.forward(weights, windows_of(ids)[at]).hidden)
    for token, left, own, found in zip(
        choice["token_ids"], choice["sampling_mask"], logits, choice["logprobs"]["content"], strict=True
    ):
        assert token in left
        assert sorted(left) == sorted(np.argsort(own)[-kept:].tolist())
        logs = tiny_moe.log_softmax(own[left][None] / 0.7)[0]
        assert found["logprob"] == pytest.approx(logs[left.index(token)], abs=TOLERANCE)


def test_weights_that_change_in_flight_give_exact_versions(tmp_path: Path) -> None:
    """Negative control: with the weights of another version the logprobs differ."""
    models = {"default": endless(0), "1": endless(1), "2": endless(2)}
    with running(tmp_path, "--model", "tiny-moe") as engine:
        update_vllm(engine, tmp_path, 0, models["default"])
        control(engine, "/update_weight_version", {"new_version": "default"})
        future = sent(engine, GENERATE, generate(max_tokens=100_000))
        in_flight(engine)
        for version in (1, 2):
            control(engine, GENERATE, generate(max_tokens=3))  # in the same passes as the one in flight
            update_vllm(engine, tmp_path, version, models[str(version)])
        control(engine, GENERATE, generate(max_tokens=3))
        control(engine, "/abort_requests", {})
        choice = future.result(60)["choices"][0]
    assert (choice["finish_reason"], [span["version"] for span in choice["weight_versions"]]) == (
        "abort",
        ["default", "1", "2"],
    )
    ids = np.concatenate([PROMPT, np.array(choice["token_ids"], np.int32)])
    rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    logprobs = np.array([each["logprob"] for each in choice["logprobs"]["content"]])
    for span in choice["weight_versions"]:
        part = slice(span["start"], span["end"])
        for version, weights in models.items():
            expected = expected_logprobs(weights, ids, len(PROMPT), rows)
            aligned = np.abs(logprobs[part] - expected[part]) < TOLERANCE
            assert aligned.all() == (version == span["version"])


def test_an_aborted_completion_is_continued_with_the_same_tokens(tmp_path: Path, engine: EngineProcess) -> None:
    request = generate(max_tokens=40)
    whole = control(engine, GENERATE, request)["choices"][0]
    cut = max(1, len(whole["token_ids"]) // 2)
    begun = np.concatenate([PROMPT, np.array(whole["token_ids"][:cut], np.int32)])
    rest = control(engine, GENERATE, generate(begun, max_tokens=40 - cut))["choices"][0]
    assert whole["token_ids"] == whole["token_ids"][:cut] + rest["token_ids"]


def test_a_long_prompt_is_read_in_several_passes(engine: EngineProcess) -> None:
    prompt = bytes_chatml.encode([user("12 " * model_sampler.PASS_ROWS)])
    request = generate(prompt, routed_experts_prompt_start=5)
    turn = control(engine, GENERATE, request)["choices"][0]
    rows = np.load(io.BytesIO(base64.b64decode(turn["routed_experts"])))
    ids = np.concatenate([prompt, np.array(turn["token_ids"], np.int32)])
    free = tiny_moe.forward(tiny_moe.initial_weights(SEED), windows_of(ids)[1:-1])
    assert np.array_equal(rows, free.routes[5:])


def test_a_request_may_follow_at_once_on_the_last_one_in_flight() -> None:
    """Within the same iteration of the loop, before the callbacks of the ended task have run."""
    settings = EngineSettings(
        host="127.0.0.1",
        port=0,
        dialect="vllm",
        seed=0,
        skill=0.5,
        latency_s=Distribution.parse("constant:0"),
        completion_tokens=Distribution.parse("constant:0"),
        routed_experts=ExpertShape(layers=0, topk=2, experts=8),
        failures=FailureRates(),
        max_model_len=1000,
        model="tiny-moe",
    )

    async def one_after_the_other() -> list[int]:
        weights = Weights(tiny_moe.initial_weights(0))
        sampler, lengths = ModelSampler(settings, weights), list[int]()
        for seed in range(3):
            request = read_generate(json.dumps(generate(seed=seed)).encode())
            flight = await weights.begin(None, None)
            sampled = await sampler.sample(request, draws_of(request, settings, b""), flight, lambda same: same)
            lengths.append(len(sampled.generation.completion_ids))
        return lengths

    assert all(0 < length <= 8 for length in asyncio.run(one_after_the_other()))


def test_a_token_outside_of_the_vocabulary_is_refused(engine: EngineProcess) -> None:
    status, body = engine.request(GENERATE, generate(np.array([1, 258])))
    assert (status, b"the prompt has token 258; the vocabulary has 258" in body) == (400, True)


def test_weights_of_another_kind_are_refused(tmp_path: Path, engine: EngineProcess) -> None:
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(write_weights(tmp_path, 3))}}
    status, body = engine.request("/collective_rpc", rpc)
    assert (status, b"cannot load a model from" in body) == (500, True)
    status, body = engine.request("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(tmp_path)})
    assert (status, b"no LoRA adapters" in body) == (400, True)
