"""ChatML over bytes: 256 byte tokens and two special tokens. Needs no files; used by the demo and
the tests.

The ids of a conversation begin with the ids of the conversation that it extends, generated
completions included. Text is encoded byte for byte; thoughts and tool calls are encoded exactly
as they were decoded. Text cannot forge special tokens.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from headpond.errors import BadRequest
from headpond.renderers.protocol import NO_IDS, NO_VALUES, TemplateValues, Tools, content_text
from headpond.turn import Ids, Message

MESSAGE_START, MESSAGE_END = 256, 257
VOCABULARY = 258
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

# A token in this module is the character with its id as code point.
START, END = chr(MESSAGE_START), chr(MESSAGE_END)
UNKNOWN = ord("?")
TOOL_CALL = re.compile(
    r'<tool_call>\n\{"name": (?P<name>"(?:[^"\\]|\\.)*"), "arguments": (?P<arguments>.*?)\}\n</tool_call>', re.DOTALL
)
THOUGHTS = re.compile(r"<think>\n(?P<thoughts>.+?)\n</think>\n\n", re.DOTALL)


class BytesChatmlRenderer:
    """A stateless renderer. It has no template: template values change nothing."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = None,
        generate: bool = True,
        values: TemplateValues = NO_VALUES,
    ) -> Ids:
        return encode(messages, tools=tools, generate=generate)

    def bridge(
        self,
        prompt_ids: Ids,
        completion_ids: Ids,
        new_messages: Sequence[Message],
        *,
        tools: Tools = None,
        values: TemplateValues = NO_VALUES,
    ) -> Ids | None:
        return encode_next(np.concatenate([prompt_ids, completion_ids]), new_messages)

    def message(
        self,
        completion_ids: Ids,
        *,
        prompt_ids: Ids = NO_IDS,
        tools: Tools = None,
        values: TemplateValues = NO_VALUES,
    ) -> dict[str, Any]:
        return decode_completion(completion_ids)

    def texts(self, ids: Ids) -> list[str]:
        return [decode(ids[at : at + 1]) for at in range(len(ids))]


def encode(messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, generate: bool = True) -> Ids:
    """Return the ids of a conversation. `generate` opens the assistant's next message. Raise
    BadRequest if content is not text."""
    parts = [_format_message("tools", _json(tools))] if tools else []
    parts += [_format_message(_role(message), _body(message)) for message in messages]
    if generate:
        parts.append(f"{START}assistant\n")
    return _ids("".join(parts))


def encode_next(history_ids: Ids, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None) -> Ids:
    """Append the ids of `messages` to `history_ids`: a prompt and its completion, or nothing."""
    if not len(history_ids):
        return encode(messages, tools=tools)
    ending = "\n" if history_ids[-1] == MESSAGE_END else f"{END}\n"
    return np.concatenate([history_ids, _ids(ending), encode(messages)])


def encode_text(text: str) -> Ids:
    return _ids(_tokens(text))


def encode_completion(message: Mapping[str, Any]) -> Ids:
    """Return the ids that a policy generates for an assistant message."""
    return _ids(_tokens(_body(message)) + END)


def decode(ids: Ids) -> str:
    """Return the text without special tokens. Ids outside the vocabulary become question marks."""
    return _text(_characters(ids).replace(START, "").replace(END, ""))


def decode_completion(ids: Ids) -> Message:
    """Return the assistant message of generated ids."""
    return _parse_message("assistant", decode(ids))


def decode_messages(ids: Ids) -> list[Message]:
    """Return the messages of a prompt made by `encode`, without the tools and the opened
    message."""
    parts = [part.partition("\n") for part in _characters(ids).split(START)[1:]]
    closed = [(role, body.removesuffix("\n")) for role, _, body in parts if body.endswith((END, f"{END}\n"))]
    return [_parse_message(role, _text(body.removesuffix(END))) for role, body in closed if role in ROLES]


def _format_message(role: str, body: str) -> str:
    return f"{START}{role}\n{_tokens(body)}{END}\n"


def _ids(tokens: str) -> Ids:
    return np.frombuffer(tokens.encode("utf-32-le"), np.int32)


def _tokens(text: str) -> str:
    return text.encode("utf-8", "replace").decode("latin-1")


def _text(tokens: str) -> str:
    return tokens.encode("latin-1").decode("utf-8", "replace")


def _characters(ids: Ids) -> str:
    valid = np.where((ids >= 0) & (ids < VOCABULARY), ids, UNKNOWN)
    return valid.astype(np.int32).tobytes().decode("utf-32-le")


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"a message has role {role!r}: use one of {', '.join(sorted(ROLES))}")
    return role


def _body(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadRequest("a message's tool_calls must be a list")
    return _thoughts(message) + content_text(message.get("content")) + "\n".join(map(_tool_call, calls))


def _thoughts(message: Mapping[str, Any]) -> str:
    """Read the thoughts from either name that engines use."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    is_text = isinstance(thoughts, str) and message.get("role", "assistant") == "assistant"
    return f"<think>\n{thoughts}\n</think>\n\n" if is_text else ""


def _tool_call(call: object) -> str:
    match call:
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            quoted = orjson.dumps(name).decode()
            return f'<tool_call>\n{{"name": {quoted}, "arguments": {arguments}}}\n</tool_call>'
        case _:
            raise BadRequest("each of a message's tool_calls needs a function with name and arguments, both strings")


def _json(tools: Sequence[Any]) -> str:
    try:
        return orjson.dumps(tools).decode()
    except TypeError as error:
        raise BadRequest(f"the tools are not JSON-serializable: {error}") from None


def _parse_message(role: str, text: str) -> Message:
    """Parse a message. Tool calls become `tool_calls` only if formatting them gives the same
    text; otherwise they stay in the content."""
    thoughts = THOUGHTS.match(text) if role == "assistant" else None
    content = text[thoughts.end() :] if thoughts else text
    message: Message = {"role": role, "content": content, **({"reasoning_content": thoughts[1]} if thoughts else {})}
    matches = list(TOOL_CALL.finditer(content)) if role == "assistant" else []
    if not matches or not all(_is_json(text) for match in matches for text in match.groups()):
        return message
    functions = [{"name": orjson.loads(match["name"]), "arguments": match["arguments"]} for match in matches]
    calls = [{"type": "function", "function": function} for function in functions]
    parsed: Message = {**message, "content": content[: matches[0].start()] or None, "tool_calls": calls}
    return parsed if _body(parsed) == text else message


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
