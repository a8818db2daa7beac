"""A recorded response with what its client asked for, as OpenAI's chat completion: the APIs give it their forms.

Values are the engine's bytes. What only training needs was requested on the client's behalf and is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson

from headpond.engines.dialects.base import TokenChoice
from headpond.renderers import PooledRenderer

# Fields of a completion and its choice. Engines add others, of any size (`indexer_topk`, `hidden_states`).
COMPLETION = frozenset(
    {"id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint"}
    | {"index", "message", "finish_reason", "stop_reason", "matched_stop"}
)
# Fields of a request -> fields of the response that the client then gets.
ON_REQUEST = {
    "logprobs": ("logprobs",),
    "prompt_logprobs": ("prompt_logprobs",),
    "return_token_ids": ("token_ids", "prompt_token_ids"),
    "return_prompt_token_ids": ("prompt_token_ids",),
    "return_meta_info": ("meta_info",),
    "return_hidden_states": ("hidden_states",),
}
NULL = msgspec.Raw(b"null")

OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Fields that a client asked for."""

    names: frozenset[str]
    stream: bool
    usage: bool  # whether a stream ends with the usage

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
    """Values that the renderer made of a completion's tokens, in place of the engine's."""

    message: bytes
    finish_reason: str | None
    logprobs: bytes | None  # None: as the engine sent them
    token_ids: bytes  # a JSON list


def completion_for(body: bytes, asked: Asked, rendered: Rendered | None = None) -> bytes:
    """Return a validated response with the fields that were asked for."""
    response = OBJECT.decode(body)
    (choice,) = CHOICES.decode(response["choices"])
    if rendered:
        ended = orjson.dumps(rendered.finish_reason)
        choice |= {"message": msgspec.Raw(rendered.message), "finish_reason": msgspec.Raw(ended)}
        choice["token_ids"] = msgspec.Raw(rendered.token_ids)
        if rendered.logprobs is not None:
            choice["logprobs"] = msgspec.Raw(rendered.logprobs)
    if "logprobs" in choice and "logprobs" not in asked.names:
        choice["logprobs"] = NULL
    return orjson.dumps(_kept(response, asked.names) | {"choices": [_kept(choice, asked.names | {"logprobs"})]})


def _kept(values: Mapping[str, msgspec.Raw], names: frozenset[str]) -> dict[str, Any]:
    return {name: fragment(value) for name, value in values.items() if name in names}


def fragment(value: msgspec.Raw) -> orjson.Fragment:
    return orjson.Fragment(bytes(value))


async def rendered_logprobs(
    renderer: PooledRenderer, tokens: Sequence[TokenChoice], fields: Mapping[str, Any]
) -> bytes | None:
    """Return logprobs in the form of OpenAI's API, with as many alternatives as the request's `top_logprobs`."""
    if not tokens:
        return None
    given = fields.get("top_logprobs")
    ranks = given if isinstance(given, int) else 0
    ids = sorted({token.id for token in tokens} | {id for token in tokens for id, _ in token.top[:ranks]})
    texts = dict(zip(ids, await renderer.texts(np.array(ids, np.int32)), strict=True))
    content = [
        _entry(texts[token.id], token.logprob)
        | {"top_logprobs": [_entry(texts[id], logprob) for id, logprob in token.top[:ranks]]}
        for token in tokens
    ]
    return orjson.dumps({"content": content})


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
