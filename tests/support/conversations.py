"""A policy for tests: completions, tokens and routed rows are pure functions of the messages."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from msgspec import structs

from headpond.recording import Prepared, Session, SessionSettings
from headpond.store.files import FileStore
from headpond.turn import RouteFormat, Routes, Turn, TurnMetadata
from support.turns import turn_of_ids

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


def rows_of(ids: Sequence[int], dtype: Any = np.uint8) -> np.ndarray:
    """One row for every token but the last, never all zeros."""
    positions, tokens = np.arange(len(ids) - 1), np.array(ids[:-1])
    grid = np.arange(1, LAYERS * TOPK + 1).reshape(1, LAYERS, TOPK)
    return ((positions + tokens)[:, None, None] * grid % 255 + 1).astype(dtype)


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
