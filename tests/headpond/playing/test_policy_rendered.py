"""A policy with a renderer: each prompt extends the tokens of the previous turn."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conversations import rows_of
from support.engine_clients import quick_engine, run
from support.engine_responses import ResponseSpec, compact
from support.stores import directory_store
from support.tokenizer_directory import tokenizer_dir
from support.upstream import ReceivedRequest, Response, serving, user
from tokenizers import Tokenizer

from headpond.config.engine import Policy
from headpond.engines.dialects import dialect_of
from headpond.engines.http.client import EngineClient
from headpond.errors import BadRequest
from headpond.playing.policy import RecordedPolicy
from headpond.recording import Mode, Session, SessionSettings
from headpond.renderers import PooledRenderer, bytes_chatml
from headpond.store.columns import read_columns

Tokenize = Callable[[str], list[int]]


def tokenize_with(directory: Path) -> Tokenize:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def responding(tokenize: Tokenize, text: str, *, routed: bool = False) -> Callable[[ReceivedRequest], Response]:
    """Token-in/token-out responses."""

    def respond(request: ReceivedRequest) -> Response:
        prompt, completion = request.body["token_ids"], tokenize(text)
        start = request.body["sampling_params"].get("routed_experts_prompt_start", 0)
        rows = rows_of([*prompt, *completion])[start:] if routed else None
        spec = ResponseSpec(
            prompt=prompt,
            completion=completion,
            logprobs=[-0.5] * len(completion),
            rows=rows,
            dialect="generate",
            form="object",
            start=start,
        )
        return Response(body=compact(spec.as_dict()))

    return respond


@contextlib.asynccontextmanager
async def recorded_policy(
    root: Path, url: str, settings: Policy, **engine: Any
) -> AsyncIterator[tuple[RecordedPolicy, Session]]:
    config = quick_engine(url, dialect="generate", **engine)
    assert settings.renderer is not None
    renderer = PooledRenderer.of(settings.renderer, config.model)
    recording = SessionSettings(session="s1", key="rollouts/r1", rollout="r1", attempt=1, mode=Mode.LINEAR)
    async with EngineClient.open(config) as client:
        session = await Session.start(directory_store(root), recording, route_format=config.route_format)
        yield RecordedPolicy(client, session, settings, dialect_of(config, renderer=renderer)), session


async def conversation(policy: RecordedPolicy, turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        messages.append(user(f"question {number}"))
        messages.append((await policy.chat(messages)).message)
    return messages


@pytest.mark.parametrize("completion", ["It is 42.<|im_end|>", "<think>\nhm\n</think>\n\n42<|im_end|>", "cut off"])
def test_a_conversation_rendered_by_a_tokenizer_is_one_sample(tmp_path: Path, completion: str) -> None:
    """Also if the template drops the reasoning of earlier turns: the sampled tokens are trained on."""
    directory = tokenizer_dir(tmp_path / "tokenizer")

    async def main() -> None:
        with serving(responding(tokenize_with(directory), completion)) as server:
            settings = Policy.model_validate({"renderer": str(directory)})
            async with recorded_policy(tmp_path / "store", server.url, settings, model="adapter-3") as (
                policy,
                session,
            ):
                messages = await conversation(policy, 3)
                sealed = await session.seal()
        assert len(sealed.sample_lengths) == 1
        columns = read_columns(directory_store(tmp_path / "store"), sealed.columns)
        text = Tokenizer.from_file(str(directory / "tokenizer.json")).decode(
            columns.input_ids.tolist(), skip_special_tokens=False
        )
        prompts = [f"<|im_start|>user\nquestion {number}<|im_end|>\n<|im_start|>assistant\n" for number in range(3)]
        between = "\n" if completion.endswith("<|im_end|>") else "<|im_end|>\n"
        assert text == between.join(question + completion for question in prompts)
        assert int(columns.loss_mask.sum()) == 3 * len(tokenize_with(directory)(completion))
        assert {request.body["model"] for request in server.received} == {"adapter-3"}
        assert "42" in messages[1]["content"] or messages[1]["content"] == "cut off"

    run(main)


def test_the_bytes_renderer_needs_no_directory(tmp_path: Path) -> None:
    def tokenize(text: str) -> list[int]:
        return bytes_chatml.encode_completion({"content": text}).tolist()

    async def main() -> None:
        with serving(responding(tokenize, "grüß dich")) as server:
            settings = Policy.model_validate({"renderer": "bytes-chatml"})
            async with recorded_policy(tmp_path, server.url, settings) as (policy, session):
                messages = await conversation(policy, 3)
                ids = session.token_ids()
                with pytest.raises(BadRequest, match=r"chat_template_kwargs .*object"):
                    await policy.chat([*messages, user("?")], chat_template_kwargs=["enable_thinking"])
        assert messages[1] == {"role": "assistant", "content": "grüß dich"}
        assert bytes_chatml.decode_messages(ids) == messages

    run(main)


def test_a_template_that_rewrites_history_starts_a_sample_with_all_rows(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ loop.revindex }}{{ message.content }}\n{% endfor %}"
    directory = tokenizer_dir(tmp_path / "tokenizer", template=template)

    async def main() -> None:
        with serving(responding(tokenize_with(directory), "fine", routed=True)) as server:
            settings = Policy.model_validate({"renderer": str(directory)})
            routed = {"routed_experts": True, "moe_experts": 256}
            async with recorded_policy(tmp_path / "store", server.url, settings, **routed) as (policy, session):
                await conversation(policy, 3)
                sealed = await session.seal()
        assert len(sealed.sample_lengths) == 3
        sampling = [request.body["sampling_params"] for request in server.received]
        assert [fields["routed_experts_prompt_start"] for fields in sampling] == [0, 0, 0]
        assert np.sum(sealed.sample_lengths) == sum(
            len(request.body["token_ids"]) + len(tokenize_with(directory)("fine")) for request in server.received
        )

    run(main)


def test_call_ids_are_unique_in_a_session_and_changed_echoes_keep_the_tokens(tmp_path: Path) -> None:
    tokenize = tokenize_with(tokenizer_dir(tmp_path / "tokenizer"))
    called = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    async def main() -> None:
        settings = Policy.model_validate({"renderer": str(tmp_path / "tokenizer")})
        with serving(responding(tokenize, f"{called}\n{called[19:]}<|im_end|>")) as server:
            async with recorded_policy(tmp_path, server.url, settings) as (policy, session):
                messages, ids = [user("add")], list[str]()
                for _ in range(2):
                    message = (await policy.chat(messages)).message
                    ids += [call["id"] for call in message["tool_calls"]]
                    echo = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
                    messages += [echo, {"role": "tool", "content": "2", "tool_call_id": ids[-1]}]
                assert ids == ["call_0_0", "call_0_1", "call_1_0", "call_1_1"]
                sealed = await session.seal()
                assert (len(sealed.sample_lengths), sealed.metrics["repaired_echoes"]) == (1, 1)

    run(main)
