import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from support.conversations import LAYERS, TOPK, rows_of
from support.engine_clients import assert_idle, quick_engine, run
from support.engine_responses import compact
from support.stores import directory_store
from support.upstream import (
    Bytes,
    ReceivedRequest,
    Response,
    answer,
    calling,
    content_ids,
    prompt_ids,
    serving,
    tool_call,
    user,
)

from headpond.config.engine import Engine, Policy, Sampling
from headpond.engines.dialects import dialect_of
from headpond.engines.dialects.base import warn_once
from headpond.engines.http.client import EngineClient
from headpond.errors import BadRequest, Busy, ConfigError, InfrastructureFailure, PolicyFailure
from headpond.playing.policy import RecordedPolicy
from headpond.recording import Mode, Session, SessionSettings
from headpond.store.columns import Columns, read_columns
from headpond.store.experts import Experts
from headpond.turn import Message


@contextlib.asynccontextmanager
async def recorded_policy(
    root: Path, *urls: str, settings: Policy | None = None, renderer: Any = None, **engine: Any
) -> AsyncIterator[tuple[RecordedPolicy, Session]]:
    settings, config = settings or Policy(), quick_engine(*urls, **engine)
    recording = SessionSettings(
        session="s1",
        key="rollouts/r1/1.aa",
        rollout="r1",
        attempt=1,
        mode=Mode.LINEAR if renderer else Mode.OPEN,
        max_seq_len=settings.max_seq_len,
        max_samples=settings.max_samples,
    )
    async with EngineClient.open(config) as client:
        session = await Session.start(directory_store(root), recording, route_format=config.route_format)
        yield RecordedPolicy(client, session, settings, dialect_of(config, renderer=renderer)), session
        assert_idle(client)


def numbered_answer(request: ReceivedRequest) -> str:
    return f"answer {len(request.messages)}"


def responding(
    text: Callable[[ReceivedRequest], str | Message] = numbered_answer, **how: Any
) -> Callable[[ReceivedRequest], Response]:
    return lambda request: Response(body=answer(request, text(request), **how))


async def conversation(policy: RecordedPolicy, turns: int, **more: Any) -> list[Message]:
    messages: list[Message] = []
    for number in range(turns):
        messages.append(user(f"question {number}"))
        messages.append((await policy.chat(messages, **more)).message)
    return messages


async def sealed(root: Path, session: Session) -> Columns:
    return read_columns(directory_store(root), (await session.seal()).columns)


def test_a_conversation_is_one_sample_of_the_tokens_of_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(responding()) as server:
            async with recorded_policy(tmp_path, server.url) as (policy, session):
                messages = await conversation(policy, 3)
                columns = await sealed(tmp_path, session)
        assert [message["content"] for message in messages[1::2]] == ["answer 1", "answer 3", "answer 5"]
        assert columns.input_ids.tolist() == prompt_ids(messages)[:-1]
        assert bytes(columns.input_ids[columns.loss_mask == 1].tolist()) == b"answer 1answer 3answer 5"
        assert orjson.loads(columns.conversation.tobytes())[0] == messages
        assert [request.messages for request in server.received] == [messages[:1], messages[:3], messages[:5]]
        sent = server.received[0].body
        assert (sent["logprobs"], sent["return_token_ids"], sent["temperature"]) == (True, True, 1.0)
        assert server.received[0].headers["X-Session-ID"] == "r1.1"
        assert "seed" not in sent

    run(main)


def test_tool_calls_are_passed_on_and_recorded(tmp_path: Path) -> None:
    def text(request: ReceivedRequest) -> str | Message:
        if len(request.messages) > 1:
            return "done"
        return calling(tool_call("add", {"a": 1}, id="c1"), tool_call("add", "not json", id="c2"))

    async def main() -> None:
        with serving(responding(text)) as server:
            async with recorded_policy(tmp_path, server.url) as (policy, session):
                first = await policy.chat([user("add")], tools=[{"type": "function", "function": {"name": "add"}}])
                assert [(call.id, call.name) for call in first.tool_calls] == [("c1", "add"), ("c2", "add")]
                assert first.content == ""
                assert first.tool_calls[0].arguments() == {"a": 1}
                with pytest.raises(PolicyFailure, match=r"add .*JSON"):
                    first.tool_calls[1].arguments()
                results = [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in first.tool_calls]
                last = await policy.chat([user("add"), first.message, *results])
                assert (last.content, list(last.tool_calls)) == ("done", [])
                assert (await session.seal()).sample_lengths == (session.token_ids().size,)
        assert server.received[0].body["tools"][0]["function"]["name"] == "add"
        assert "tools" not in server.received[1].body

    run(main)


@pytest.mark.parametrize("call", [{}, {"function": None}, {"function": {"name": "f", "arguments": {"a": 1}}}])
def test_a_malformed_tool_call_is_an_infrastructure_failure(tmp_path: Path, call: Message) -> None:
    async def main() -> None:
        def respond(request: ReceivedRequest) -> Response:
            body = orjson.loads(answer(request, "x"))
            body["choices"][0]["message"] = calling(call)
            return Response(body=compact(body))

        with serving(respond) as server:
            async with recorded_policy(tmp_path, server.url, retries=1) as (policy, session):
                with pytest.raises(InfrastructureFailure, match="tool call"):
                    await policy.chat([user("hello")])
                assert (session.turns, len(server.received)) == (0, 2)

    run(main)


def test_agents_and_their_sampling_are_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    settings = Policy(sampling=Sampling(temperature=0.8, top_p=1.0, max_tokens=50, more={"min_tokens": 1}))

    async def main() -> None:
        with serving(responding()) as server:
            async with recorded_policy(tmp_path, server.url, settings=settings) as (policy, session):
                await policy.chat([user("one")], agent="solver")
                await policy.chat([user("two")], agent="judge", train=False, temperature=0.0, max_tokens=None)
                await policy.chat([user("three")], agent="solver", top_p=0.9, top_k=20)
                await policy.chat([user("four")], agent="solver", top_p=0.9, top_k=20)
                columns = await sealed(tmp_path, session)
        turns = columns.turns
        assert [turns.words["agent"][index] for index in turns.agent] == ["solver", "judge", "solver", "solver"]
        assert turns.temperature.tolist() == pytest.approx([0.8, 0.0, 0.8, 0.8])
        assert [turns.words["sampling"][index] for index in turns.sampling][1:3] == ["{}", '{"top_k":20,"top_p":0.9}']
        trained = [columns.loss_mask[columns.sample(sample)].any() for sample in range(4)]
        assert trained == [True, False, True, True]
        assert "max_tokens" not in server.received[1].body
        assert (server.received[0].body["max_tokens"], server.received[0].body["min_tokens"]) == (50, 1)

    with caplog.at_level(logging.WARNING):
        run(main)
    assert caplog.text.count("action=altered_sampling fields=top_k, top_p") == 1


def test_reserved_sampling_fields_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(responding()) as server:
            async with recorded_policy(tmp_path, server.url) as (policy, _):
                with pytest.raises(BadRequest, match="logprobs, n: Headpond sets these fields"):
                    await policy.chat([user("hello")], n=2, logprobs=False)
                with pytest.raises(BadRequest, match="not JSON-serializable"):
                    await policy.chat([user("hello")], logit_bias={1: object()})
                assert not server.received

    run(main)


def test_seeds_differ_by_turn_and_repeat_in_the_next_attempt(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(responding()) as server:
            for attempt in ("first", "second"):
                async with recorded_policy(tmp_path / attempt, server.url, settings=Policy(seeded=True)) as (policy, _):
                    await conversation(policy, 3)
            seeds = [request.body["seed"] for request in server.received]
            assert seeds[:3] == seeds[3:]
            assert len(set(seeds)) == 3

    run(main)


def test_turns_are_limited(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(responding()) as server:
            async with recorded_policy(tmp_path, server.url, settings=Policy(max_turns=2)) as (policy, session):
                with pytest.raises(PolicyFailure, match=r"turn limit: .*2 turns"):
                    await conversation(policy, 3)
                assert session.turns == 2

    run(main)


@pytest.mark.parametrize("dialect", ["vllm", "generate"])
def test_a_completion_beyond_the_context_is_cut_and_ends_the_conversation(tmp_path: Path, dialect: str) -> None:
    async def main() -> None:
        settings, renderer = Policy(max_seq_len=40), Bytes() if dialect == "generate" else None
        with serving(responding(lambda _: "x" * 50, dialect=dialect)) as server:
            async with recorded_policy(
                tmp_path, server.url, settings=settings, renderer=renderer, dialect=dialect
            ) as opened:
                policy, session = opened
                completion = await policy.chat([user("hello")])
                assert completion.truncated
                with pytest.raises(PolicyFailure, match=r"context limit: .*policy\.max_seq_len \(40\)"):
                    await policy.chat([user("hello"), completion.message, user("and?")])
                assert (await policy.chat([user("hello")])).truncated
                assert (await session.seal()).sample_lengths == (40, 40)
                assert len(server.received) == 2

    run(main)


def test_a_prompt_beyond_the_context_is_recorded_as_a_failure(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(responding()) as server:
            async with recorded_policy(tmp_path, server.url, settings=Policy(max_seq_len=20)) as (policy, session):
                with pytest.raises(PolicyFailure, match=r"context limit: .*20 tokens"):
                    await policy.chat([user("h" * 100)])
                columns = await sealed(tmp_path, session)
                assert (columns.overlong_prompt.tolist(), columns.loss_mask.sum()) == ([1], 0)

    run(main)


def test_one_chat_at_a_time(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(responding()) as server:
            async with recorded_policy(tmp_path, server.url) as (policy, session):
                results = await asyncio.gather(
                    policy.chat([user("one")]), policy.chat([user("two")]), return_exceptions=True
                )
                assert isinstance(results[1], Busy)
                assert session.turns == 1

    run(main)


def test_a_rollout_stays_on_its_replica_and_records_its_version(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(responding()) as one, serving(responding()) as other:
            one.weights, other.weights = "3", "4"
            async with EngineClient.open(quick_engine(one.url, other.url)) as client:
                for number in range(2):
                    settings = SessionSettings(session="s", key=f"rollouts/{number}", rollout="r", attempt=1)
                    session = await Session.start(directory_store(tmp_path), settings)
                    await conversation(RecordedPolicy(client, session, Policy(), dialect_of(client.settings)), 3)
                    sealed = await session.seal(version_after=client.replicas.after)
                    assert (sealed.version_first, sealed.version_last) == (3 + number, 3 + number)
                    assert sealed.inexact_tokens == 0
        assert (len(one.received), len(other.received)) == (3, 3)

    run(main)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "generate"])
def test_every_dialect_records_the_same_tokens_and_rows(tmp_path: Path, dialect: str) -> None:
    def text(_: ReceivedRequest) -> str:
        return "ok"

    async def main() -> None:
        renderer = Bytes() if dialect == "generate" else None
        engine = {"dialect": dialect, "routed_experts": True, "hidden_layers": LAYERS, "moe_experts": 256}
        engine |= {"experts_per_token": TOPK}
        with serving(responding(text, dialect=dialect, routed=True)) as server:
            async with recorded_policy(tmp_path, server.url, renderer=renderer, **engine) as (policy, session):
                messages = await conversation(policy, 3)
                result = await session.seal()
        ids = [token for message in messages for token in content_ids(message)]
        columns = read_columns(directory_store(tmp_path), result.columns)
        assert [token for token in columns.input_ids.tolist() if token > 4] == ids
        assert result.experts
        out = np.empty((columns.input_ids.size, LAYERS, TOPK), np.int16)
        Experts(directory_store(tmp_path), result.experts).read(0, 0, len(out), out)
        np.testing.assert_array_equal(out[:-1], rows_of(columns.input_ids.tolist()))
        assert len(result.sample_lengths) == 1
        assert result.version_last == (7 if dialect == "sglang" else 0)
        assert_request(dialect, server.received[-1].body, columns.input_ids.size)

    run(main)


def assert_request(dialect: str, body: Message, tokens: int) -> None:
    match dialect:
        case "vllm":
            assert body["return_token_ids"]
        case "sglang":
            assert body["return_meta_info"]
            assert body["return_prompt_token_ids"]
            assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 0)
        case _:
            assert body["sampling_params"]["logprobs"] == 1
            start = body["sampling_params"]["routed_experts_prompt_start"]
            assert 0 < start < len(body["token_ids"]) == tokens - len("ok")


def test_generate_needs_a_renderer_and_vllm_refuses_one() -> None:
    with pytest.raises(ConfigError, match=r"engine\.dialect = 'generate' .*renderer"):
        dialect_of(Engine(dialect="generate"))
    with pytest.raises(ConfigError, match=r"engine\.dialect = 'vllm' .*policy\.renderer"):
        dialect_of(Engine(dialect="vllm"), renderer=Bytes())


def test_rows_of_another_shape_are_an_infrastructure_failure(tmp_path: Path) -> None:
    def respond(request: ReceivedRequest) -> Response:
        body = orjson.loads(answer(request, "x", routed=True))
        if len(request.messages) > 1:
            routed = body["choices"][0]["routed_experts"]
            rows, layers, topk = routed["shape"]
            routed["shape"] = [rows, layers * topk, 1]
        return Response(body=compact(body))

    async def main() -> None:
        with serving(respond) as server:
            async with recorded_policy(tmp_path, server.url, retries=1) as (policy, session):
                with pytest.raises(InfrastructureFailure, match="layers"):
                    await conversation(policy, 2)
                assert session.turns == 1

    run(main)
