"""A recorded response as its client gets it: what the client asked for, as one object or as an event stream.

Values are the engine's bytes. What only training needs was requested on the client's behalf and is left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

EVENT_STREAM = "text/event-stream; charset=utf-8"
COMPLETION = frozenset(
    {"id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint"}
    | {"index", "message", "finish_reason", "stop_reason", "matched_stop"}
)
"""Fields of a completion and its choice. Engines add others, of any size (`indexer_topk`, `hidden_states`)."""
ON_REQUEST = {
    "logprobs": ("logprobs",),
    "prompt_logprobs": ("prompt_logprobs",),
    "return_token_ids": ("token_ids", "prompt_token_ids"),
    "return_prompt_token_ids": ("prompt_token_ids",),
    "return_meta_info": ("meta_info",),
    "return_hidden_states": ("hidden_states",),
}
"""Fields that a client gets if it sets the request's field."""
ENVELOPE = ("id", "created", "model", "service_tier", "system_fingerprint")
NULL = msgspec.Raw(b"null")

OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a client asked to be in its response."""

    names: frozenset[str]
    stream: bool
    usage: bool
    """at the end of a stream"""

    @classmethod
    def by(cls, fields: Mapping[str, Any]) -> "Asked":
        options = fields.get("stream_options")
        return cls(
            names=COMPLETION.union(*(names for field, names in ON_REQUEST.items() if fields.get(field))),
            stream=bool(fields.get("stream")),
            usage=isinstance(options, dict) and bool(options.get("include_usage")),
        )


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """What the renderer made of a completion's tokens, in place of the engine's."""

    message: bytes
    finish_reason: str | None
    logprobs: bytes | None
    """None: as the engine sent them"""


def completion_for(body: bytes, asked: Asked, rendered: Rendered | None = None) -> bytes:
    """A validated response without what was not asked for."""
    response = OBJECT.decode(body)
    (choice,) = CHOICES.decode(response["choices"])
    if rendered:
        ended = orjson.dumps(rendered.finish_reason)
        choice |= {"message": msgspec.Raw(rendered.message), "finish_reason": msgspec.Raw(ended)}
        if rendered.logprobs is not None:
            choice["logprobs"] = msgspec.Raw(rendered.logprobs)
    if "logprobs" in choice and "logprobs" not in asked.names:
        choice["logprobs"] = NULL
    return orjson.dumps(_kept(response, asked.names) | {"choices": [_kept(choice, asked.names | {"logprobs"})]})


def as_event_stream(completion: bytes, asked: Asked) -> bytes:
    """The events of a stream: role, thoughts, content, each tool call, the end, and the usage if asked for. Clients
    that take only one kind of delta from a chunk would lose the others."""
    response = OBJECT.decode(completion)
    (choice,) = CHOICES.decode(response["choices"])
    envelope: dict[str, Any] = {name: _fragment(response[name]) for name in ENVELOPE if name in response}
    envelope["object"] = "chat.completion.chunk"
    deltas = _deltas(orjson.loads(bytes(choice["message"])))
    chunks: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    chunks.append({"index": 0, "delta": {}, "finish_reason": _fragment(choice.get("finish_reason", NULL))})
    if "logprobs" in asked.names:
        _bearer(chunks)["logprobs"] = _fragment(choice.get("logprobs", NULL))
    events = [orjson.dumps(envelope | {"choices": [chunk]}) for chunk in chunks]
    if asked.usage and "usage" in response:
        events.append(orjson.dumps(envelope | {"choices": [], "usage": _fragment(response["usage"])}))
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


def _kept(values: Mapping[str, msgspec.Raw], names: frozenset[str]) -> dict[str, Any]:
    return {name: _fragment(value) for name, value in values.items() if name in names}


def _fragment(value: msgspec.Raw) -> orjson.Fragment:
    return orjson.Fragment(bytes(value))
