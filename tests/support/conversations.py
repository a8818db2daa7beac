"""A policy for tests: completions, tokens and routed rows are pure functions of the messages."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from msgspec import structs

from headpond.engines.responses.cuts import longest_in_ids
from headpond.recording import Prepared, Session, SessionSettings
from headpond.store.files import FileStore
from headpond.turn import Fingerprint, Ids, Logprobs, OpenSample, RouteFormat, Routes, Turn, TurnMetadata, VersionSpan

ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
LAYERS, TOPK = 3, 2


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def prompt_ids(messages: Sequence[dict[str, Any]]) -> list[int]:
    return [token for message in messages for token in (ROLES[message["role"]], *message["content"].encode())] + [3]


def answer_to(messages: Sequence[dict[str, Any]]) -> str:
    return f"answer {xxhash.xxh3_64_intdigest(json.dumps(messages).encode()) % 1000}"


def conversation_of(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The conversation whose user messages are `texts`."""
    messages: list[dict[str, Any]] = []
    for text in texts:
        messages.append(user(text))
        messages.append(assistant(answer_to(messages)))
    return messages


def rows_of(ids: Sequence[int]) -> np.ndarray:
    """One row for every token but the last, never all zeros."""
    positions, tokens = np.arange(len(ids) - 1), np.array(ids[:-1])
    grid = np.arange(1, LAYERS * TOPK + 1).reshape(1, LAYERS, TOPK)
    return ((positions + tokens)[:, None, None] * grid % 255 + 1).astype(np.uint8)


def turn_for(prepared: Prepared, messages: Sequence[dict[str, Any]], *, routed: bool = True, **more: Any) -> Turn:
    prompt, completion = prompt_ids(messages), list(answer_to(messages).encode())
    turn = turn_of_ids(
        np.array(prompt, np.int32),
        np.array(completion, np.int32),
        -np.array(completion, np.float32) / 64,
        open_samples=prepared.open_samples,
        routes=Routes(first=0, rows=rows_of(prompt + completion), valid=None, format=RouteFormat()) if routed else None,
        finish_reason="stop",
        **more,
    )
    return structs.replace(turn, message=json.dumps(assistant(answer_to(messages))).encode())


async def chat(session: Session, messages: Sequence[dict[str, Any]], *, agent: str = "", **more: Any) -> str:
    """Record one turn as the session server and the policy do."""
    with session.claim() as claim:
        prepared = session.prepare(claim, list(messages))
        turn = turn_for(prepared, messages, max_seq_len=session.settings.max_seq_len, **more)
        record = json.dumps(answer_to(messages)).encode()
        assert await session.commit(claim, prepared, turn, TurnMetadata(agent=agent, engine="e1"), record=record)
    return answer_to(messages)


async def talk(session: Session, texts: Sequence[str], *, after: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Record a turn for every user message in `texts`."""
    messages = list(after)
    for text in texts:
        messages.append(user(text))
        messages.append(assistant(await chat(session, messages)))
    return messages


async def started(store: FileStore, key: str = "rollouts/r1/1.aa", **more: Any) -> Session:
    settings = SessionSettings(session="s1", key=key, rollout="r1", attempt=1, **more)
    return await Session.start(store, settings)


def turn_of_ids(
    prompt_ids: Ids,
    completion_ids: Ids,
    completion_logprobs: Logprobs,
    *,
    open_samples: Sequence[OpenSample] = (),
    routes: Routes | None = None,
    max_seq_len: int | None = None,
    finish_reason: str | None = None,
    spans: Sequence[tuple[int, int, int]] = (),
    ended: int | None = None,
) -> Turn:
    """The turn of a response with these tokens. `routes` may include rows that the sample has already."""
    match = longest_in_ids(prompt_ids, [sample.sequence for sample in open_samples])
    before = open_samples[match.index].sequence if match else Fingerprint()
    tokens = len(prompt_ids) + len(completion_ids)
    limit = tokens if max_seq_len is None else max_seq_len
    kept_prompt = prompt_ids[before.tokens : limit]
    kept_completion = completion_ids[: max(0, limit - len(prompt_ids))]
    return Turn(
        extends=match.index if match else None,
        matches=match.matches if match else 0,
        prefix_tokens=before.tokens,
        prompt_ids=kept_prompt,
        completion_ids=kept_completion,
        completion_logprobs=completion_logprobs[: len(kept_completion)],
        routes=routes,
        sequence=before.extended(kept_prompt, kept_completion),
        finish_reason=finish_reason,
        version=ended,
        version_spans=tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in spans),
        message=None,
        truncated=tokens > limit,
        overlong_prompt=len(prompt_ids) > limit,
    )
