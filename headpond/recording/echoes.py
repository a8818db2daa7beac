"""Echoes: assistant messages that come back with a request. Recorded answers among them are
recognised and restored.

A message has two forms. The exact form has every compared field. The meaning is text up to white
space, and the names and arguments of tool calls: agents' frameworks keep these when they return a
message. Thoughts and call ids are not part of it.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, cast

import orjson
import xxhash

from headpond.turn import Message


class Echo(StrEnum):
    # An assistant message with the meaning of a recorded answer is that answer.
    RECOGNISED = "recognised"
    EXACT = "exact"  # An assistant message is a recorded answer only if it is the same message.


# Fields by which messages are compared. An absent field, null, "" and [] are equal.
COMPARED = ("role", "content", "reasoning_content", "tool_calls")
# Other names of an assistant's thoughts. If they are changed, the recorded answer is restored.
THOUGHTS = ("reasoning", "thinking", "thinking_blocks", "reasoning_details")
FORMS = {Echo.EXACT: COMPARED, Echo.RECOGNISED: (*COMPARED, *THOUGHTS)}
TEXT_PARTS = frozenset({"text", "output_text"})
THOUGHT_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
END_OF_THOUGHTS = "</think>"
MAX_SAFE_INTEGER = 2**53  # Larger floats are all integers, and print differently.


def exact_form(message: Message, echo: Echo) -> bytes:
    """A digest of every compared field. The position of a tool call (`index`) is left out: streams
    add it."""
    compared = {name: message[name] for name in FORMS[echo] if message.get(name)}
    if calls := compared.get("tool_calls"):
        compared["tool_calls"] = [_without_index(call) for call in calls] if isinstance(calls, list) else calls
    return xxhash.xxh3_128_digest(orjson.dumps(compared, option=orjson.OPT_SORT_KEYS))


def meaning(message: Message) -> bytes:
    """A digest of an assistant message that its echo shares."""
    calls = message.get("tool_calls")
    called = [_called(call) for call in cast("list[object]", calls)] if isinstance(calls, list) else [calls or None]
    return xxhash.xxh3_128_digest(orjson.dumps([_text(message.get("content")), called], option=orjson.OPT_SORT_KEYS))


def calls_alone(message: Message) -> bytes | None:
    """The meaning without the text beside the calls, which some frameworks drop. None if it equals
    `meaning`."""
    return meaning({**message, "content": None}) if message.get("tool_calls") and message.get("content") else None


def restored(messages: Sequence[Message], answers: Mapping[int, Message]) -> list[Message]:
    """The messages with recorded answers at the given positions. Tool messages behind an answer get
    its call ids."""
    call_ids, with_answers = dict[Any, Any](), list[Message]()
    for position, message in enumerate(messages):
        if (answer := answers.get(position)) is not None:
            call_ids |= dict(zip(_call_ids(message), _call_ids(answer), strict=False))
            message = _sendable(answer)
        elif (id := message.get("tool_call_id")) in call_ids:
            message = {**message, "tool_call_id": call_ids[id]}
        with_answers.append(message)
    return with_answers


def is_text(part: object, role: object) -> bool:
    """Whether a part of a message's content can be recorded: text, or an assistant's thoughts."""
    match part:
        case {"type": "text"}:
            return True
        case {"type": str(kind)}:
            return role == "assistant" and kind in TEXT_PARTS | THOUGHT_PARTS
        case _:
            return False


def _sendable(answer: Message) -> Message:
    """The answer without empty fields: some engines reject those that they send themselves."""
    content = None if answer.get("tool_calls") else ""
    return {"role": "assistant", "content": content, **{name: value for name, value in answer.items() if value}}


def _without_index(call: object) -> object:
    if not isinstance(call, dict):
        return call
    return {name: value for name, value in cast("dict[str, object]", call).items() if name != "index"}


def _call_ids(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    listed = cast("list[object]", calls) if isinstance(calls, list) else []
    ids = [cast("dict[str, Any]", call).get("id") if isinstance(call, dict) else None for call in listed]
    return [id if isinstance(id, str) else None for id in ids]


def _text(content: object) -> object:
    """Words, one space apart, without thoughts. Content of an unknown form is compared as it is."""
    if isinstance(content, list):
        parts = cast("list[object]", content)
        texts = [_part_text(part) for part in parts]
        if any(text is None for text in texts):
            return parts
        content = "".join(filter(None, texts))
    if content is None:
        return ""
    if not isinstance(content, str):
        return content
    _, closed, answer = content.partition(END_OF_THOUGHTS)
    return " ".join((answer if closed else content).split())


def _part_text(part: object) -> str | None:
    match part:
        case {"type": kind, "text": str(text)} if kind in TEXT_PARTS:
            return text
        case {"type": kind} if kind in THOUGHT_PARTS:
            return ""
        case _:
            return None


def _called(call: object) -> object:
    match call:
        case {"function": {"name": name, **function}}:
            return [name, _arguments(function.get("arguments"))]
        case _:
            return call


def _arguments(arguments: object) -> object:
    """The arguments of a call as canonical JSON; absent ones are an empty object.

    A policy may write text that is not JSON, or nested too deeply. Such text is compared as it is.
    """
    if arguments in (None, ""):
        arguments = {}
    try:
        value = orjson.loads(arguments) if isinstance(arguments, str) else arguments
        return orjson.dumps(_numbers(value), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):
        return arguments


def _numbers(value: object) -> object:
    """1.0 and 1 are one number: JavaScript writes the latter for both."""
    match value:
        case float() if value.is_integer() and abs(value) <= MAX_SAFE_INTEGER:
            return int(value)
        case dict():
            return {name: _numbers(item) for name, item in cast("dict[str, object]", value).items()}
        case list():
            return [_numbers(item) for item in cast("list[object]", value)]
        case _:
            return value
