"""Anthropic's Messages API.

Text blocks of a message are one text; the blocks of assistant messages in a row are one answer, as in the API itself.
Thoughts are thinking blocks, whose signature is a digest: no client checks it, and many return only signed ones.
"""

import re
from base64 import b64encode
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import orjson
import xxhash

from headpond.errors import BadRequest
from headpond.servers.sessions.apis.base import (
    JOINED_BY,
    Api,
    AssistantParts,
    ChatRequest,
    Completion,
    Fields,
    History,
    Recorded,
    arguments_object,
    arguments_text,
    as_chat,
    event,
    function_tool,
    json_format,
    listed,
    mapping,
    part_text,
    passed,
    refuse,
    text_of,
    tool_call,
    unsupported,
    with_system,
)
from headpond.turn import Message

TEXT = frozenset({"text"})
REFUSED = {
    "mcp_servers": "declare the tools of the server in tools, and call them in the agent",
    "container": "tools run in the agent",
}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# The system text of Claude Code begins with it. Its number changes with every request; it is not for the model.
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
# Claude Code looks for these words before it compacts its context.
TOO_LONG = "prompt is too long"


class Messages(Api):
    path: ClassVar[str] = "/v1/messages"
    keep_alive: ClassVar[bytes] = event("ping", {"type": "ping"})

    def chat(self, given: dict[str, Any], history: History | None) -> ChatRequest:
        refuse(given, REFUSED)
        messages = with_system(
            [_system(given.get("system"))], as_chat(given.get("messages"), "messages", _add_blocks, _other_messages)
        )
        if messages and messages[-1]["role"] == "assistant":
            raise BadRequest("messages ends with an assistant's message: a recording continues no text of a client")
        fields = passed(given) | {"messages": messages}
        if (limit := given.get("max_tokens")) is not None:
            fields["max_tokens"] = limit
        if stop := given.get("stop_sequences"):
            fields["stop"] = stop
        if tools := listed(given.get("tools"), "tools"):
            fields["tools"] = [_tool(mapping(tool, f"tools[{at}]"), f"tools[{at}]") for at, tool in enumerate(tools)]
            fields |= _tool_choice(given.get("tool_choice"))
        match given.get("output_config"):
            case {"format": {"type": "json_schema", "schema": schema}}:
                fields["response_format"] = json_format(None, schema)
            case {"format": {"type": kind}}:
                raise BadRequest(f"output_config.format of type {kind!r} cannot be recorded: use json_schema")
            case _:
                pass
        return ChatRequest(fields=fields)

    def response(self, recorded: Recorded) -> bytes:
        completion = Completion.of(recorded.completion)
        content = list(_blocks(completion))
        return orjson.dumps(_message(recorded.id, completion) | {"content": content, **_end(completion)})

    def stream(self, recorded: Recorded) -> bytes:
        completion = Completion.of(recorded.completion)
        message = _message(recorded.id, completion)
        message["usage"] = {**message["usage"], "output_tokens": 0}
        events = [event("message_start", {"type": "message_start", "message": message})]
        for index, block in enumerate(_blocks(completion)):
            empty, deltas = _deltas(block)
            start = {"type": "content_block_start", "index": index, "content_block": empty}
            events.append(event("content_block_start", start))
            events += (
                event("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta})
                for delta in deltas
            )
            events.append(event("content_block_stop", {"type": "content_block_stop", "index": index}))
        end = {"type": "message_delta", "delta": _end(completion), "usage": _usage(completion)}
        return b"".join([*events, event("message_delta", end), event("message_stop", {"type": "message_stop"})])

    def error(self, status: int, text: str, code: str) -> dict[str, Any]:
        kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        message = f"{TOO_LONG}: {text}" if code == "context_length_exceeded" else text
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}

    def error_events(self, error: dict[str, Any]) -> bytes:
        return event("error", error)


def _system(system: object) -> str:
    parts = [{"type": "text", "text": system}] if isinstance(system, str) else listed(system, "system")
    texts = (BILLING.sub("", part_text(part, f"system[{at}]", TEXT)) for at, part in enumerate(parts))
    return JOINED_BY.join(filter(None, texts))


def _add_blocks(assistant: AssistantParts, message: Fields, where: str) -> bool:
    if message.get("role") != "assistant":
        return False
    content = message.get("content")
    if isinstance(content, str):
        assistant.texts.append(content)
        return True
    for at, block in enumerate(listed(content, f"{where}.content")):
        match block:
            case {"type": "text", "text": str(text)}:
                assistant.texts.append(text)
            case {"type": "thinking", "thinking": str(thoughts)}:
                assistant.thoughts.append(thoughts)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(arguments)}:
                assistant.calls.append(tool_call(id, name, arguments_text(cast("Fields", arguments))))
            case _:
                raise unsupported(block, f"{where}.content[{at}]")
    return True


def _other_messages(message: Fields, where: str) -> Iterator[Message]:
    match message.get("role"):
        case "user":
            yield from _user(message.get("content"), f"{where}.content")
        case "system":
            yield {"role": "system", "content": text_of(message.get("content"), f"{where}.content", TEXT)}
        case role:
            raise BadRequest(f"{where}.role must be user, assistant or system, not {role!r}")


def _user(content: object, where: str) -> Iterator[Message]:
    """Results of tools are messages of their own; text around them is the user's."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    blocks, texts = listed(content, where), list[str]()
    for at, block in enumerate(blocks):
        match block:
            case {"type": "tool_result", "tool_use_id": str(id), **rest}:
                if texts:
                    yield {"role": "user", "content": JOINED_BY.join(texts)}
                    texts = []
                result = text_of(rest.get("content"), f"{where}[{at}].content", TEXT)
                yield {"role": "tool", "tool_call_id": id, "content": result}
            case _:
                texts.append(part_text(block, f"{where}[{at}]", TEXT))
    if texts or not blocks:
        yield {"role": "user", "content": JOINED_BY.join(texts)}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(f"{where}.type {tool['type']!r} cannot be recorded: declare a tool with an input_schema")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _tool_choice(choice: object) -> dict[str, Any]:
    if choice is None:
        return {}
    given = mapping(choice, "tool_choice")
    parallel = {"parallel_tool_calls": False} if given.get("disable_parallel_tool_use") else {}
    match given:
        case {"type": "tool", "name": name}:
            return {"tool_choice": {"type": "function", "function": {"name": name}}} | parallel
        case {"type": str(kind)} if kind in TOOL_CHOICES:
            return {"tool_choice": TOOL_CHOICES[kind]} | parallel
        case _:
            raise BadRequest(f"tool_choice.type must be auto, any, tool or none, not {given.get('type')!r}")


def _message(id: str, completion: Completion) -> dict[str, Any]:
    return {
        "id": f"msg_{id}",
        "type": "message",
        "role": "assistant",
        "model": completion.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(completion),
    }


def _blocks(completion: Completion) -> Iterator[dict[str, Any]]:
    calls = list(completion.calls)
    if thoughts := completion.thoughts:
        yield {"type": "thinking", "thinking": thoughts, "signature": _signature(thoughts)}
    if completion.text or not calls:
        yield {"type": "text", "text": completion.text}
    for id, name, arguments in calls:
        yield {"type": "tool_use", "id": id, "name": name, "input": arguments_object(arguments)}


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as its stream begins it, and what follows."""
    match block["type"]:
        case "thinking":
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
            return block | {"thinking": "", "signature": ""}, deltas
        case "text":
            return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}] if block["text"] else []
        case _:
            text = orjson.dumps(block["input"]).decode()
            return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def _signature(thoughts: str) -> str:
    return b64encode(xxhash.xxh3_128_digest(thoughts.encode("utf-8", "replace"))).decode()


def _end(completion: Completion) -> dict[str, Any]:
    reason = completion.finish_reason or "stop"
    if reason == "stop" and completion.message.get("tool_calls"):
        reason = "tool_calls"
    if reason == "stop" and completion.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop}
    return {"stop_reason": STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}


def _usage(completion: Completion) -> dict[str, int]:
    return {
        "input_tokens": completion.prompt_tokens - completion.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": completion.cached_tokens,
        "output_tokens": completion.completion_tokens,
    }
