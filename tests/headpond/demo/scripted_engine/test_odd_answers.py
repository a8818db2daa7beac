"""The engine's odd answers (aborts, unfinished thoughts, missing logprobs and experts, older releases), recorded by the
library as those of the real servers are."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_clients import attempt_of, loaded, run, stage_of
from support.engine_process import CHAT, GENERATE, RECORDED_FIELDS, EngineProcess, running, user
from support.engine_responses import request_info
from support.stores import directory_store
from support.waiting import wait_until

from headpond.config.engine import Policy as PolicySettings
from headpond.engines.responses.response import read_turn
from headpond.environments.builtin.arithmetic import Arithmetic
from headpond.playing.rollout import play
from headpond.records.rollout import RolloutResult
from headpond.renderers import bytes_chatml
from headpond.store.columns import Columns, read_columns

SHAPE = ("--layers", "3", "--topk", "2", "--experts", "16", "--length", "constant:30")
ROUTED: dict[str, Any] = {"routed_experts": True, "hidden_layers": 3, "experts_per_token": 2, "moe_experts": 16}
ROLLOUTS = 12


def played(
    root: Path, engine: EngineProcess, dialect: str, *, rollouts: int = ROLLOUTS, **settings: Any
) -> list[tuple[RolloutResult, Columns]]:
    results: list[tuple[RolloutResult, Columns]] = []
    renderer = {} if dialect == "vllm" else {"renderer": "bytes-chatml"}
    policy = PolicySettings.model_validate({"sampling": {"max_tokens": 200}, **renderer})
    host, port = engine.address

    async def main() -> None:
        engine_settings: dict[str, Any] = {"dialect": dialect, "retries": 20, **ROUTED, **settings}
        async with stage_of(root, f"http://{host}:{port}", policy=policy, **engine_settings) as stage:
            for number in range(rollouts):
                result = await play(stage, loaded(Arithmetic()), 0, attempt_of(f"r{number}"))
                assert result.columns is not None
                results.append((result, read_columns(directory_store(root), result.columns)))

    run(main)
    return results


def words(columns: Columns, name: str = "finish_reason") -> list[str]:
    return [columns.turns.words[name][index] for index in getattr(columns.turns, name)]


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "generate"])
def test_rollouts_of_an_engine_that_aborts_have_the_tokens_of_one_that_does_not(tmp_path: Path, dialect: str) -> None:
    server = ("--dialect", "sglang") if dialect == "sglang" else ()
    with (
        running(tmp_path, *SHAPE, *server, "--failures", "abort=0.4") as aborting,
        running(tmp_path, *SHAPE, *server) as plain,
    ):
        aborted = played(tmp_path / "aborted", aborting, dialect)
        expected = played(tmp_path / "expected", plain, dialect)
    assert sum(result.metrics["engine_aborts"] for result, _ in aborted) >= 3
    assert sum(result.metrics["engine_aborts"] for result, _ in expected) == 0
    for (result, columns), (_, other) in zip(aborted, expected, strict=True):
        assert np.array_equal(columns.input_ids, other.input_ids)
        assert np.array_equal(columns.logprobs, other.logprobs)
        assert np.array_equal(columns.loss_mask, other.loss_mask)
        assert "abort" not in words(columns)
        assert result.metrics["missing_routes"] == 0


@pytest.mark.parametrize("dialect", ["vllm", "generate"])
def test_requests_that_a_client_aborts_are_survived(tmp_path: Path, dialect: str) -> None:
    """As by vLLM's /pause in its default mode. Two are aborted in flight, the third is answered."""

    def abort_twice(engine: EngineProcess) -> None:
        for _ in range(2):
            wait_until(lambda: json.loads(engine.answer("/abort_requests", {}))["aborted"], what="a request in flight")

    with running(tmp_path, *SHAPE, "--latency", "constant:1") as engine, ThreadPoolExecutor() as pool:
        aborting = pool.submit(abort_twice, engine)
        ((result, columns),) = played(tmp_path / "store", engine, dialect, rollouts=1)
        aborting.result()
    assert (result.metrics["engine_aborts"], words(columns)) == (2, ["stop"])
    assert result.metrics["missing_routes"] == 0


def test_an_unfinished_thought_is_a_rollout_that_hit_its_limit(tmp_path: Path) -> None:
    with running(tmp_path, *SHAPE, "--failures", "thought=1") as engine:
        body = json.loads(engine.answer(CHAT, {"messages": [user("hi")]} | RECORDED_FIELDS["vllm"]))
        results = played(tmp_path / "store", engine, "vllm")
    message = body["choices"][0]["message"]
    assert (message["content"], bool(message["reasoning"])) == (None, True)
    for result, columns in results:
        assert (result.hit_max_tokens, words(columns)) == (True, ["length"])
        assert columns.loss_mask.any()


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "generate"])
def test_a_token_without_a_logprob_is_not_trained(tmp_path: Path, dialect: str) -> None:
    server = ("--dialect", "sglang") if dialect == "sglang" else ()
    with running(tmp_path, *SHAPE, *server, "--failures", "sentinel=1") as engine:
        results = played(tmp_path / "store", engine, dialect)
    for result, columns in results:
        assert result.metrics["unknown_logprobs"] == 1
        assert (columns.loss_mask[-1], columns.logprobs[-1]) == (0, 0.0)
        assert columns.loss_mask.sum() == result.completion_tokens - 1
        assert columns.logprobs.min() > -10


def test_absent_experts_are_counted(tmp_path: Path) -> None:
    with running(tmp_path, *SHAPE, "--failures", "no_experts=0.5") as engine:
        results = played(tmp_path / "store", engine, "vllm", absent_routes="mask")
        again = played(tmp_path / "again", engine, "vllm")
    absent = [result.metrics["absent_routes"] for result, _ in results]
    assert set(absent) == {0, 1}
    assert [columns.loss_mask.any() for _, columns in results] == [not count for count in absent]
    assert [result.metrics["missing_routes"] for result, _ in again] == [0] * ROLLOUTS, "asked for again"


def test_generate_names_tokens_by_their_ids(tmp_path: Path) -> None:
    prompt = bytes_chatml.encode([user("hi")])
    request = {"token_ids": prompt.tolist(), "sampling_params": {"logprobs": 1}}
    with running(tmp_path, *SHAPE) as engine:
        body = engine.answer(GENERATE, request)
    assert next(iter(json.loads(body)["choices"][0]["logprobs"]["content"][0])) == "token_id"
    turn = read_turn(body, request=request_info("generate", prompt_ids=prompt))
    assert turn.routes is not None
    assert len(turn.routes.rows) == turn.tokens - 1


def test_an_answer_is_continued_where_the_prompt_ends(tmp_path: Path) -> None:
    prompt = bytes_chatml.encode([user("What is 12 + 3?")])
    with running(tmp_path, *SHAPE) as engine:

        def completion(ids: list[int], **sampling: Any) -> list[int]:
            request = {"token_ids": ids, "sampling_params": {"logprobs": 1, **sampling}}
            return json.loads(engine.answer(GENERATE, request))["choices"][0]["token_ids"]

        whole = completion(prompt.tolist())
        for length in (1, 10, len(whole) - 1):
            assert completion([*prompt.tolist(), *whole[:length]]) == whole[length:]
        assert completion([*prompt.tolist(), *whole[:10]], max_tokens=5) == whole[10:15]
        other = [*prompt.tolist(), *bytes_chatml.encode_text("another answer").tolist()]
        assert completion(other)[-1] == bytes_chatml.MESSAGE_END
