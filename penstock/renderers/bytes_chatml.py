"""Messages as ChatML over bytes: 256 byte tokens and two special ones. Needs no files; the demo and the tests use it.

A conversation's ids begin with those of the conversation that it extends, generated answers included: text is taken
byte for byte, and a tool call is written exactly as it was read. Text cannot forge a special token.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from penstock.errors import BadRequest
from penstock.turn import Ids, Message

MESSAGE_START, MESSAGE_END = 256, 257
VOCABULARY = 258
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

# Inside this module a token is the character of its number, so that ids are a string's code points.
START, END = chr(MESSAGE_START), chr(MESSAGE_END)
UNKNOWN = ord("?")
TOOL_CALL = re.compile(
    r'<tool_call>\n\{"name": (?P<name>"(?:[^"\\]|\\.)*"), "arguments": (?P<arguments>.*?)\}\n</tool_call>', re.DOTALL
)


def encode(messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, generate: bool = True) -> Ids:
    """The ids of a conversation; `generate` opens the assistant's next message. BadRequest for what is not text."""
    parts = [_written("tools", _json(tools))] if tools else []
    parts += [_written(_role(message), _body(message)) for message in messages]
    if generate:
        parts.append(f"{START}assistant\n")
    return _ids("".join(parts))


def encode_next(history_ids: Ids, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None) -> Ids:
    """`history_ids` (a prompt and its answer, or none yet), and then the ids of the messages that follow."""
    if not len(history_ids):
        return encode(messages, tools=tools)
    ending = "\n" if history_ids[-1] == MESSAGE_END else f"{END}\n"
    return np.concatenate([history_ids, _ids(ending), encode(messages)])


def encode_text(text: str) -> Ids:
    return _ids(_tokens(text))


def encode_answer(message: Mapping[str, Any]) -> Ids:
    """The ids that a policy generates to say an assistant's message."""
    return _ids(_tokens(_body(message)) + END)


def decode(ids: Ids) -> str:
    """The text, without special tokens. An id that is none of ours is a question mark."""
    return _text(_characters(ids).replace(START, "").replace(END, ""))


def decode_answer(ids: Ids) -> Message:
    """The assistant's message that was generated."""
    return _spoken("assistant", decode(ids))


def decode_messages(ids: Ids) -> list[Message]:
    """The messages of a prompt that `encode` made; the opened one is left out, and so are the tools."""
    parts = [part.partition("\n") for part in _characters(ids).split(START)[1:]]
    ended = [(role, body.removesuffix("\n")) for role, _, body in parts if body.endswith((END, f"{END}\n"))]
    return [_spoken(role, _text(body.removesuffix(END))) for role, body in ended if role in ROLES]


def _written(role: str, body: str) -> str:
    return f"{START}{role}\n{_tokens(body)}{END}\n"


def _ids(tokens: str) -> Ids:
    return np.frombuffer(tokens.encode("utf-32-le"), np.int32)


def _tokens(text: str) -> str:
    return text.encode("utf-8", "replace").decode("latin-1")


def _text(tokens: str) -> str:
    return tokens.encode("latin-1").decode("utf-8", "replace")


def _characters(ids: Ids) -> str:
    known = np.where((ids >= 0) & (ids < VOCABULARY), ids, UNKNOWN)
    return known.astype(np.int32).tobytes().decode("utf-32-le")


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"a message has role {role!r}, which is none of {', '.join(sorted(ROLES))}")
    return role


def _body(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadRequest("a message's tool_calls must be a list")
    return _content(message.get("content")) + "\n".join(map(_tool_call, calls))


def _content(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(map(_part, content if isinstance(content, list) else [content]))


def _part(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            raise BadRequest("a message has content that is not text: images and the like are not supported")


def _tool_call(call: object) -> str:
    match call:
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            quoted = orjson.dumps(name).decode()
            return f'<tool_call>\n{{"name": {quoted}, "arguments": {arguments}}}\n</tool_call>'
        case _:
            raise BadRequest("a message's tool_calls need a function with a name and arguments, both text")


def _json(tools: Sequence[Any]) -> str:
    try:
        return orjson.dumps(tools).decode()
    except TypeError as error:
        raise BadRequest(f"the tools hold what JSON cannot: {error}") from None


def _spoken(role: str, text: str) -> Message:
    """Tool calls are taken out of an assistant's text only where writing them gives the same text again."""
    message: Message = {"role": role, "content": text}
    found = list(TOOL_CALL.finditer(text)) if role == "assistant" else []
    if not found or not all(_is_json(text) for call in found for text in call.groups()):
        return message
    functions = [{"name": orjson.loads(call["name"]), "arguments": call["arguments"]} for call in found]
    calls = [{"type": "function", "function": function} for function in functions]
    called: Message = {"role": role, "content": text[: found[0].start()] or None, "tool_calls": calls}
    return called if _body(called) == text else message


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
