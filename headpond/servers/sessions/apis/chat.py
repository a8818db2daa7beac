"""OpenAI's Chat Completions: the form in which chats are recorded."""

from collections.abc import Iterator
from typing import Any, ClassVar

import orjson

from headpond.engines.dialects.base import CHAT_PATH
from headpond.servers.sessions.apis.base import OF_OPERATORS, Api, ChatRequest, History, Recorded, refuse
from headpond.servers.sessions.client_response import CHOICES, NULL, OBJECT, Asked, fragment

REFUSED = OF_OPERATORS | {
    "audio": "answers are text",
    "web_search_options": "declare a tool that the agent runs",
    "functions": "declare them in tools",
    "function_call": "send tool_choice",
}
ENVELOPE = ("id", "created", "model", "service_tier", "system_fingerprint")


class ChatCompletions(Api):
    path: ClassVar[str] = CHAT_PATH

    def chat(self, given: dict[str, Any], history: History | None) -> ChatRequest:
        refuse(given, REFUSED)
        return ChatRequest(fields=given)

    def response(self, recorded: Recorded) -> bytes:
        return recorded.completion

    def stream(self, recorded: Recorded) -> bytes:
        return event_stream(recorded.completion, recorded.asked)


def event_stream(completion: bytes, asked: Asked) -> bytes:
    """The events of a stream: role, thoughts, content, each tool call, the end, and the usage if asked for. Clients
    that take only one kind of delta from a chunk would lose the others."""
    response = OBJECT.decode(completion)
    (choice,) = CHOICES.decode(response["choices"])
    envelope: dict[str, Any] = {name: fragment(response[name]) for name in ENVELOPE if name in response}
    envelope["object"] = "chat.completion.chunk"
    deltas = _deltas(orjson.loads(bytes(choice["message"])))
    chunks: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    chunks.append({"index": 0, "delta": {}, "finish_reason": fragment(choice.get("finish_reason", NULL))})
    if "logprobs" in asked.names:
        _bearer(chunks)["logprobs"] = fragment(choice.get("logprobs", NULL))
    events = [orjson.dumps(envelope | {"choices": [chunk]}) for chunk in chunks]
    if asked.usage and "usage" in response:
        events.append(orjson.dumps(envelope | {"choices": [], "usage": fragment(response["usage"])}))
    return b"".join(b"data: %b\n\n" % event for event in (*events, b"[DONE]"))


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    given = {name: value for name, value in message.items() if value not in (None, "", [])}
    calls = given.pop("tool_calls", [])
    given.pop("role", None)
    yield {"role": "assistant", "content": None if calls and "content" not in given else ""}
    for name in sorted(given, key="content".__eq__):  # thoughts come first
        yield {name: given[name]}
    for index, call in enumerate(calls):
        yield {"tool_calls": [{"index": index, **call}]}


def _bearer(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The chunk with the logprobs: that of the content, or the first one behind the role."""
    return next((chunk for chunk in chunks[1:] if "content" in chunk["delta"]), chunks[1])
