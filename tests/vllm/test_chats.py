"""The chat dialect with a real server: every turn is recorded as the engine sampled it."""

import asyncio
from typing import Any

import pytest
from support.vllm_playing import PLAIN, Played, Table
from support.vllm_server import AnyEngine
from support.waiting import wait_until, wait_until_async

from headpond.errors import InfrastructureFailure

RUNNING, TOKENS = "vllm:num_requests_running", "vllm:generation_tokens_total"


def test_a_turn_is_what_the_engine_sampled(table: Table) -> None:
    (played,) = table.play()
    (completion,) = played.completions
    assert 0 < len(completion) <= 48
    assert played.columns.loss_mask.sum() == len(completion) == played.result.completion_tokens
    logprobs = played.columns.logprobs[played.columns.loss_mask != 0]
    assert (logprobs < 0).any()
    assert played.answers[0]["content"]
    assert played.finish_reasons[0] in ("stop", "length")


def test_later_turns_extend_the_first(table: Table) -> None:
    played = table.play(8, turns=3)
    for each in played:
        assert each.result.turns == 3
        assert each.columns.loss_mask.sum() == sum(map(len, each.completions))
    # Text that was sampled as other tokens than it is encoded to begins a new sample.
    assert any(len(each.samples) == 1 for each in played), "the template renders earlier turns otherwise"


def test_the_same_seed_samples_the_same_tokens(table: Table) -> None:
    first, again, other = (table.play(seed=seed)[0] for seed in (5, 5, 6))
    assert as_sampled(first) == as_sampled(again) != as_sampled(other)


def as_sampled(played: Played) -> Any:
    return played.completions[0]


def test_a_stop_string_ends_a_completion(table: Table) -> None:
    text = table.play(seed=1, text="Say something, 1.")[0].answers[0]["content"]
    stop = text[len(text) // 2 :][:5]
    (stopped,) = table.play(seed=1, text="Say something, 1.", sampling={"stop": [stop]})
    assert stopped.answers[0]["content"] == text.partition(stop)[0]
    assert stopped.finish_reasons == ["stop"]
    assert stopped.columns.loss_mask.sum() == len(stopped.completions[0])


def test_a_completion_may_end_at_its_limit(table: Table) -> None:
    (played,) = table.play(sampling={"max_tokens": 3})
    assert played.finish_reasons == ["length"]
    assert len(played.completions[0]) == 3


def test_a_prompt_beyond_the_context_is_a_failure_of_the_policy(table: Table, engine: AnyEngine) -> None:
    (played,) = table.play(text="word " * 2 * engine.max_model_len)
    assert played.result.columns is None
    assert "context limit" in (played.result.policy_error or "")


def test_64_rollouts_at_once(table: Table) -> None:
    played = table.play(64, turns=2, sampling={"max_tokens": 16})
    assert [each.result.turns for each in played] == [2] * 64
    assert all(0 < len(completion) <= 16 for each in played for completion in each.completions)


def test_an_unknown_model_is_an_error_in_the_words_of_the_engine(table: Table) -> None:
    table.settings["engine"]["model"] = "polcy"
    with pytest.raises(InfrastructureFailure, match=r"polcy.*engine\.model"):
        table.play()


def test_tools_are_called_and_answered(table: Table) -> None:
    played = table.play(8, turns=2, tools=True, text="What is {example} plus {other}?")
    calls = [call for each in played for answer in each.answers for call in answer.get("tool_calls") or []]
    assert {call["function"]["name"] for call in calls} <= {"add"}
    assert sum(each.result.metrics["calls"] for each in played) == len(calls)


def test_requests_are_cancelled_with_their_rollouts(table: Table, engine: AnyEngine) -> None:
    """A rollout that is cancelled closes its connection, and the engine aborts the request."""

    before = engine.metric(TOKENS)

    async def generating() -> bool:
        return await asyncio.to_thread(engine.metric, TOKENS) > before

    async def cancel() -> None:
        await wait_until_async(generating)
        raise KeyError

    long = {"max_tokens": 2000, "ignore_eos": True}
    with pytest.raises(KeyError):
        table.play(2, more={**PLAIN, **long}, meanwhile=cancel)
    wait_until(lambda: engine.metric(RUNNING) == 0, what="the engine to abort the requests")
