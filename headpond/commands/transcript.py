"""A recorded session as text to read: its samples, turns, thoughts, tool calls and tokens."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from headpond.store.columns import Columns

THOUGHTS = ("reasoning_content", "reasoning")
MARKS = {"thoughts": "> ", "text": "", "call": "-> "}


def transcript(columns: Columns, *, title: str) -> str:
    return "\n".join(_lines(columns, title)) + "\n"


def _lines(columns: Columns, title: str) -> Iterator[str]:
    lengths, turns = np.diff(columns.sample_offsets), columns.turns
    yield f"# {title}"
    yield ""
    yield (
        f"{len(turns.start)} turns, {len(lengths)} samples, {int(columns.metrics.get('breaks', 0))} breaks, "
        f"{len(columns.input_ids)} tokens, {int(columns.loss_mask.sum())} of them trained on"
    )
    conversations: list[list[dict[str, Any]]] = json.loads(columns.conversation.tobytes() or b"[]")
    for sample, length in enumerate(lengths.tolist()):
        own = np.flatnonzero(turns.sample == sample)
        yield ""
        yield f"## Sample {sample}{_origin(columns, sample)}: {length} tokens, turns {_numbers(own.tolist())}"
        for turn in own.tolist():
            yield _turn(columns, turn)
        for message in conversations[sample] if sample < len(conversations) else []:
            yield from _message(message)


def _origin(columns: Columns, sample: int) -> str:
    agent = columns.turns.words["agent"][columns.agent[sample]] if columns.agent is not None else ""
    parent = int(columns.parent[sample]) if columns.parent is not None else -1
    return (f" of {agent}" if agent else "") + (f", from sample {parent}" if parent >= 0 else "")


def _turn(columns: Columns, turn: int) -> str:
    turns = columns.turns
    sampled = int(turns.end[turn] - turns.start[turn])
    reason = turns.words["finish_reason"][turns.finish_reason[turn]]
    unseen = ", unseen" if turns.unseen is not None and turns.unseen[turn] else ""
    logprob = columns.logprobs[turns.start[turn] : turns.end[turn]].mean() if sampled else 0.0
    return f"- turn {turn}: {sampled} sampled tokens, mean logprob {logprob:.3f}, ended by {reason or '?'}{unseen}"


def _message(message: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield f"### {message.get('role', 'message')}"
    for kind, text in message_parts(message):
        yield from (MARKS[kind] + line for line in (text.splitlines() if kind == "thoughts" else [text]))


def message_parts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The thoughts, the text and the calls of a message, each with its kind."""
    if thoughts := next(filter(None, map(message.get, THOUGHTS)), None):
        yield "thoughts", str(thoughts)
    if content := message.get("content"):
        yield "text", content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield "call", f"{function.get('name')}({function.get('arguments')})"


def _numbers(turns: list[int]) -> str:
    return ", ".join(map(str, turns)) or "none"
