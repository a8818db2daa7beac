"""An engine's JSON by type, in the three dialects; values are checked while they are decoded.

Whether the parts of a reply agree with each other is for `responses.py` to say.
"""

from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import Upstream
from penstock.fingerprints import Ids

Logprobs = NDArray[np.float32]

MAX_TOKEN_ID = MAX_VERSION = 2**31 - 1
"""Both are kept as i32."""
LOGPROB_ROUNDING = 1e-3
"""Engines round: a logprob may be this much above 0."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
Logprob = Annotated[float, msgspec.Meta(ge=float(np.finfo(np.float32).min), le=LOGPROB_ROUNDING)]
Version = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
ABSENT = msgspec.Raw(b"null")


class Endpoint(StrEnum):
    """What the request was sent to. A chat may be answered in vLLM's dialect or in SGLang's; the answer shows which."""

    CHAT = "/v1/chat/completions"
    GENERATE = "/inference/v1/generate"


class AnyObject(msgspec.Struct):
    pass


class Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[AnyObject] | None = None


class TokenLogprob(msgspec.Struct, gc=False):
    logprob: Logprob


class NamedLogprob(TokenLogprob, gc=False):
    """Token-in/token-out has no text to name a token by: `token_id:<id>`."""

    token: str


AnyLogprob = TypeVar("AnyLogprob", bound=TokenLogprob)
Value = TypeVar("Value")


class TokenLogprobs(msgspec.Struct, Generic[AnyLogprob]):
    content: list[AnyLogprob]


class OutputToken(msgspec.Struct, array_like=True, gc=False):
    """SGLang's `[logprob, token_id, ...]`."""

    logprob: Logprob
    token_id: TokenId


class MetaInfo(msgspec.Struct):
    """Where SGLang says what it did."""

    output_token_logprobs: list[OutputToken] | None = None
    completion_tokens: int | None = None
    weight_version: str | Version | None = None
    routed_experts: msgspec.Raw = ABSENT


NO_META_INFO = MetaInfo()


class Choice(msgspec.Struct, Generic[AnyLogprob]):
    message: msgspec.Raw = ABSENT
    logprobs: TokenLogprobs[AnyLogprob] | None = None
    token_ids: msgspec.Raw = ABSENT
    prompt_token_ids: msgspec.Raw = ABSENT
    routed_experts: msgspec.Raw = ABSENT
    finish_reason: str | None = None
    meta_info: MetaInfo | None = None


class Reply(msgspec.Struct, Generic[AnyLogprob]):
    choices: list[Choice[AnyLogprob]]
    prompt_token_ids: msgspec.Raw = ABSENT

    def only_choice(self) -> Choice[AnyLogprob]:
        if len(self.choices) != 1:
            raise Upstream(f"the engine answered with {len(self.choices)} choices: exactly one can be recorded")
        return self.choices[0]


CHAT_REPLY = msgspec.json.Decoder(Reply[TokenLogprob])
GENERATE_REPLY = msgspec.json.Decoder(Reply[NamedLogprob])
TOKEN_IDS = msgspec.json.Decoder(list[TokenId])
MESSAGE = msgspec.json.Decoder(Message)


def read_reply(text: bytes, endpoint: Endpoint) -> Reply[Any]:
    if not text.isascii():
        text.decode()  # msgspec does not look at the encoding of what it skips
    return (CHAT_REPLY if endpoint is Endpoint.CHAT else GENERATE_REPLY).decode(text)


def read_part(raw: bytes | memoryview | msgspec.Raw, decoder: msgspec.json.Decoder[Value], name: str) -> Value:
    """A part of a reply by type; msgspec's message names places inside of it, so the part is named here."""
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise Upstream(f"the engine's answer is malformed: {error} of {name}") from None


def read_ids(raw: bytes, name: str) -> Ids:
    """A JSON list of ids: from text to array where it is compact, else by type, which says what is wrong with it."""
    ids = compact_ids(raw)
    return np.array(read_part(raw, TOKEN_IDS, name), np.int32) if ids is None else ids


def compact_ids(raw: bytes) -> Ids | None:
    """The ids of a JSON list that has nothing but digits and commas in it; None of every other value."""
    text = raw[1:-1]
    if raw[:1] != b"[" or text.translate(None, b"0123456789,"):
        return None
    if not text:
        return np.empty(0, np.int32)
    ids = np.fromstring(text, np.int64, sep=",")
    return ids.astype(np.int32) if ids.max() <= MAX_TOKEN_ID else None
