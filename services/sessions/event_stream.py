"""A whole response as the event stream that a streaming client expects: one chunk, then `[DONE]`."""

from typing import Any

import msgspec
import orjson

EVENT_STREAM = "text/event-stream; charset=utf-8"
ENVELOPE = ("id", "created", "model", "service_tier", "system_fingerprint", "usage")


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: str | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")


class _Response(msgspec.Struct):
    choices: list[_Choice]
    id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    created: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    service_tier: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


RESPONSE = msgspec.json.Decoder(_Response)


def as_event_stream(body: bytes, *, logprobs: bool) -> bytes:
    """`body` is a validated response; `logprobs`: whether the client requested them."""
    response = RESPONSE.decode(body)
    choice = response.choices[0]
    delta = {name: value for name, value in choice.message.items() if value not in (None, [])}
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    chunk: dict[str, Any] = {
        name: orjson.Fragment(bytes(value))
        for name in ENVELOPE
        if isinstance(value := getattr(response, name), msgspec.Raw)
    }
    streamed: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", **delta}}
    if logprobs:
        streamed["logprobs"] = orjson.Fragment(bytes(choice.logprobs))
    streamed["finish_reason"] = choice.finish_reason
    chunk |= {"object": "chat.completion.chunk", "choices": [streamed]}
    return b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(chunk)
