"""Completions that the engine aborts: continued where tokens are sent, asked for again elsewhere, never recorded."""

import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conversations import LAYERS, TOPK, rows_of
from support.engine_clients import assert_idle, quick_engine, run
from support.engine_responses import compact
from support.real_responses import Json, sglang_chat, vllm_chat, vllm_generate
from support.stores import directory_store
from support.upstream import Bytes, ReceivedRequest, Response, Server, prompt_ids, serving, user

from headpond.config.engine import Policy, Sampling
from headpond.engines.dialects import Prompt, dialect_of
from headpond.engines.http.client import EngineClient
from headpond.engines.replicas.selection import Replicas
from headpond.engines.responses.continuation import MAX_CONTINUATIONS, can_continue
from headpond.errors import InfrastructureFailure
from headpond.playing.policy import RecordedPolicy
from headpond.recording import Mode, Session, SessionSettings
from headpond.records.rollout import Recorded
from headpond.store.columns import read_columns
from headpond.store.experts import Experts

ANSWER = b"the answer is 42"
ROUTED = {"routed_experts": True, "hidden_layers": LAYERS, "experts_per_token": TOPK, "moe_experts": 256}


def begun_of(ids: list[int]) -> int:
    """How much of ANSWER a prompt ends with."""
    return next(length for length in range(len(ANSWER), -1, -1) if bytes(ids).endswith(ANSWER[:length]))


def aborting(
    dialect: str, pieces: list[int], *, rows_in_aborted: bool = False, routed: bool = True, spans: bool = True
) -> Callable[[ReceivedRequest], Response]:
    """ANSWER in pieces: request number n, sampled by version 7 + n, is aborted after `pieces[n]` tokens; requests
    behind the last get the rest."""
    seen = [0]

    def respond(request: ReceivedRequest) -> Response:
        if dialect == "vllm":
            prompt = prompt_ids(request.messages)
            begun = 0
        else:
            prompt = request.body["token_ids" if dialect == "generate" else "input_ids"]
            begun = begun_of(prompt)
        number, seen[0] = seen[0], seen[0] + 1
        aborted = number < len(pieces)
        completion = list(ANSWER[begun : begun + pieces[number]] if aborted else ANSWER[begun:])
        logprobs = [-(begun + at) / 8 for at in range(len(completion))]
        start = request.body.get("routed_experts_start_len", 0)
        start = request.body.get("sampling_params", {}).get("routed_experts_prompt_start", start)
        rows = rows_of([*prompt, *completion])[start:] if routed and (not aborted or rows_in_aborted) else None
        answer = {"vllm": vllm_chat, "generate": vllm_generate, "sglang": sglang_chat}[dialect]
        body: Json = answer(
            prompt=prompt,
            completion=completion,
            logprobs=logprobs,
            finish_reason="abort" if aborted else "stop",
            rows=rows,
            **({} if dialect == "vllm" else {"version": 7 + number}),
        )
        if not spans:
            body["choices"][0].get("meta_info", body["choices"][0])["weight_versions"] = None
        return Response(body=compact(body))

    return respond


@contextlib.asynccontextmanager
async def recorded_policy(
    root: Path, url: str, dialect: str, *, sampling: Sampling | None = None, **engine: Any
) -> AsyncIterator[tuple[RecordedPolicy, Session]]:
    config, renderer = quick_engine(url, dialect=dialect, **engine), None if dialect == "vllm" else Bytes()
    mode = Mode.OPEN if dialect == "vllm" else Mode.LINEAR
    async with EngineClient.open(config) as client:
        yield await policy_of(client, root, mode, renderer, sampling)
        assert_idle(client)


async def policy_of(
    client: EngineClient, root: Path, mode: Mode, renderer: Bytes | None, sampling: Sampling | None = None
) -> tuple[RecordedPolicy, Session]:
    config = client.settings
    recording = SessionSettings(session="s1", key="rollouts/r1/1.aa", rollout="r1", attempt=1, mode=mode)
    session = await Session.start(directory_store(root), recording, route_format=config.route_format)
    settings = Policy(sampling=sampling or Sampling(), seeded=True)
    return RecordedPolicy(client, session, settings, dialect_of(config, renderer=renderer)), session


@pytest.mark.parametrize("rows_in_aborted", [False, True], ids=["", "rows in aborted parts"])
@pytest.mark.parametrize("pieces", [[5], [0], [3, 0, 4], [1] * MAX_CONTINUATIONS], ids=str)
@pytest.mark.parametrize("dialect", ["generate", "sglang"])
def test_an_aborted_completion_is_continued_as_if_it_had_not_been(
    tmp_path: Path, dialect: str, pieces: list[int], rows_in_aborted: bool
) -> None:
    async def main() -> None:
        with serving(aborting(dialect, pieces, rows_in_aborted=rows_in_aborted)) as server:
            sampling = Sampling(max_tokens=100)
            async with recorded_policy(tmp_path, server.url, dialect, sampling=sampling, **ROUTED) as opened:
                policy, session = opened
                completion = await policy.chat([user("what?")])
                assert completion.message == {"role": "assistant", "content": ANSWER.decode()}
                assert (completion.finish_reason, policy.aborts, policy.failures) == ("stop", len(pieces), 0)
                await policy.chat([user("what?"), completion.message, user("again?")])
                result = await session.seal()
        columns = read_columns(directory_store(tmp_path), result.columns)
        assert bytes(columns.input_ids[columns.loss_mask == 1].tolist()) == ANSWER * 2
        expected = [-at / 8 for at in range(len(ANSWER))] * 2
        assert columns.logprobs[columns.loss_mask == 1].tolist() == expected
        assert (len(result.sample_lengths), result.metrics["missing_routes"], columns.turns.sample.size) == (1, 0, 2)
        assert result.experts
        out = np.empty((columns.input_ids.size, LAYERS, TOPK), np.int16)
        Experts(directory_store(tmp_path), result.experts).read(0, 0, len(out), out)
        np.testing.assert_array_equal(out[:-1], rows_of(columns.input_ids.tolist()))
        bodies = [request.body.get("sampling_params", request.body) for request in server.received]
        done = np.cumsum([0, *pieces])
        assert [body["max_tokens"] for body in bodies] == [*(100 - done), 100]
        assert len({body["seed"] for body in bodies}) == len(bodies), "a continuation draws other numbers"

    run(main)


@pytest.mark.parametrize("dialect", ["generate", "sglang"])
def test_each_part_keeps_the_version_that_sampled_it(tmp_path: Path, dialect: str) -> None:
    async def main() -> None:
        with serving(aborting(dialect, [5, 0, 4], routed=False)) as server:
            async with recorded_policy(tmp_path, server.url, dialect) as (policy, session):
                await policy.chat([user("what?")])
                columns = read_columns(directory_store(tmp_path), (await session.seal()).columns)
        turns, (start,) = columns.turns, columns.turns.start.tolist()
        assert (turns.version_first.tolist(), turns.version_last.tolist()) == ([7], [10])
        assert turns.version_exact.tolist() == [1]
        assert columns.span_start.tolist() == [start, start + 5, start + 9]
        assert columns.span_version.tolist() == [7, 9, 10]

    run(main)


def test_parts_that_state_different_versions_are_not_exact(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(aborting("sglang", [5], routed=False, spans=False)) as server:
            async with recorded_policy(tmp_path, server.url, "sglang") as (policy, session):
                await policy.chat([user("what?")])
                columns = read_columns(directory_store(tmp_path), (await session.seal()).columns)
        turns = columns.turns
        assert (turns.version_last.tolist(), turns.version_exact.tolist()) == ([8], [0])
        assert turns.version_first[0] <= 7

    run(main)


def test_parts_without_versions_are_exact_if_the_replica_says_the_same_before_and_after(tmp_path: Path) -> None:
    sealed = played_in_parts(tmp_path)
    assert (sealed.version_first, sealed.version_last, sealed.inexact_tokens) == (4, 4, 0)


@pytest.mark.parametrize("request_number", range(3))
def test_parts_without_versions_are_a_range_across_an_update(tmp_path: Path, request_number: int) -> None:
    def update(number: int, servers: list[Server], _: Replicas) -> None:
        if number == request_number:
            servers[0].weights = "5"

    sealed = played_in_parts(tmp_path, update)
    assert (sealed.version_first, sealed.version_last, sealed.inexact_tokens) == (4, 5, len(ANSWER))


def test_parts_without_versions_are_not_exact_if_the_replica_may_have_restarted_between_them(tmp_path: Path) -> None:
    def fail(number: int, _: list[Server], replicas: Replicas) -> None:
        if number == 1:
            replicas.all[0].doubt()

    sealed = played_in_parts(tmp_path, fail)
    assert (sealed.version_first, sealed.version_last, sealed.inexact_tokens) == (4, 4, len(ANSWER))


def test_parts_without_versions_are_not_exact_if_two_replicas_sampled_them(tmp_path: Path) -> None:
    def leave(number: int, servers: list[Server], replicas: Replicas) -> None:
        if number == 0:
            (asked,) = [replica for replica in replicas.all if replica.in_flight]
            asked.unreachable_at = time.monotonic()
        elif number == 1:
            assert all(server.received for server in servers)

    sealed = played_in_parts(tmp_path, leave, replicas=2)
    assert (sealed.version_first, sealed.version_last, sealed.inexact_tokens) == (4, 4, len(ANSWER))


def played_in_parts(
    root: Path,
    at_request: Callable[[int, list[Server], Replicas], None] = lambda *_: None,
    *,
    replicas: int = 1,
) -> Recorded:
    """ANSWER in three parts that state no versions, by replicas that say that theirs is 4. `at_request` is called with
    the number of each request before it is answered."""
    answer = aborting("generate", [5, 4], routed=False, spans=False)
    numbers, clients, sealed = itertools.count(), list[EngineClient](), list[Recorded]()

    def respond(request: ReceivedRequest) -> Response:
        at_request(next(numbers), servers, clients[0].replicas)
        return answer(request)

    async def main() -> None:
        config = quick_engine(*(server.url for server in servers), dialect="generate")
        async with EngineClient.open(config) as client:
            clients.append(client)
            policy, session = await policy_of(client, root, Mode.LINEAR, Bytes())
            assert (await policy.chat([user("what?")])).message["content"] == ANSWER.decode()
            sealed.append(await session.seal(version_after=client.replicas.after))

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(respond)) for _ in range(replicas)]
        for server in servers:
            server.weights = "4"
        run(main)
    return sealed[0]


def test_routed_rows_are_never_requested_from_behind_the_prompt(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(aborting("generate", [0, 3], rows_in_aborted=True)) as server:
            async with recorded_policy(tmp_path, server.url, "generate", **ROUTED) as (policy, _):
                await policy.chat([user("what?")])
        for request in server.received:
            start = request.body["sampling_params"]["routed_experts_prompt_start"]
            assert start < len(request.body["token_ids"])

    run(main)


@pytest.mark.parametrize(("limit", "reason"), [(5, "length"), (6, "stop")])
def test_a_completion_that_was_aborted_at_its_limit_is_complete(tmp_path: Path, limit: int, reason: str) -> None:
    async def main() -> None:
        with serving(aborting("generate", [5], routed=False)) as server:
            sampling = Sampling(max_tokens=limit)
            async with recorded_policy(tmp_path, server.url, "generate", sampling=sampling) as (policy, session):
                completion = await policy.chat([user("what?")])
                assert completion.finish_reason == reason
                assert (await session.seal()).hit_max_tokens == (reason == "length")
        assert len(server.received) == (1 if reason == "length" else 2)

    run(main)


def test_a_completion_is_continued_a_limited_number_of_times(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(aborting("generate", [1] * 100, routed=False)) as server:
            async with recorded_policy(tmp_path, server.url, "generate") as (policy, session):
                with pytest.raises(InfrastructureFailure, match=r"aborted one completion 9 times: .*mode=keep"):
                    await policy.chat([user("what?")])
                assert session.turns == 0
        assert len(server.received) == 1 + MAX_CONTINUATIONS

    run(main)


@pytest.mark.parametrize(
    ("dialect", "sampling"),
    [
        ("vllm", Sampling()),
        ("generate", Sampling(repetition_penalty=1.1)),
        ("generate", Sampling(presence_penalty=0.5)),
        ("generate", Sampling(stop=("\n",))),
        ("generate", Sampling(more={"structured_outputs": {"regex": "[0-9]+"}})),
    ],
    ids=str,
)
def test_a_completion_that_cannot_be_continued_is_asked_for_again(
    tmp_path: Path, dialect: str, sampling: Sampling
) -> None:
    async def main() -> None:
        with serving(aborting(dialect, [5, 0, 16])) as server:
            async with recorded_policy(tmp_path, server.url, dialect, sampling=sampling, **ROUTED) as opened:
                policy, session = opened
                completion = await policy.chat([user("what?")])
                assert (completion.finish_reason, policy.aborts) == ("stop", 3)
                assert session.turns == 1
                columns = read_columns(directory_store(tmp_path), (await session.seal()).columns)
        assert bytes(columns.input_ids[columns.loss_mask == 1].tolist()) == ANSWER
        assert [request.retry for request in server.received] == [0, 1, 2, 3]
        assert len({str(request.body) for request in server.received}) == 1

    run(main)


def test_an_engine_that_keeps_aborting_is_an_infrastructure_failure_that_says_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(aborting("vllm", [5] * 100)) as server:
            async with recorded_policy(tmp_path, server.url, "vllm", retries=2) as (policy, session):
                with pytest.raises(InfrastructureFailure, match=r"3 times .*aborted the completion .*mode=keep"):
                    await policy.chat([user("what?")])
                assert session.turns == 0

    run(main)


@pytest.mark.parametrize(
    ("sampling", "tools", "possible"),
    [
        ({"temperature": 0.7, "top_p": 0.9, "max_tokens": 5, "repetition_penalty": 1.0, "stop": None}, None, True),
        ({"frequency_penalty": 0.1}, None, False),
        ({"response_format": {"type": "json_object"}}, None, False),
        ({"min_tokens": 5}, None, False),
        ({}, [{"type": "function", "function": {"name": "f"}}], True),
        ({}, [{"type": "function", "function": {"name": "f", "strict": True}}], False),
    ],
    ids=str,
)
def test_only_what_acts_on_single_tokens_is_continued(sampling: Any, tools: Any, possible: bool) -> None:
    prompt = Prompt(messages=[], tools=tools, ids=np.array([1], np.int32))
    assert can_continue(prompt, sampling) == possible
    assert not can_continue(Prompt(messages=[], tools=tools), sampling), "the engine renders the prompt"
