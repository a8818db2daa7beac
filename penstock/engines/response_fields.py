"""What an engine's JSON says, in three dialects: checked by type while it is decoded, then part against part.

Knows one reply and nothing of earlier ones.
"""

from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import Upstream
from penstock.turn import Ids, ids_text

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


def completion_of(choice: Choice[Any], meta_info: MetaInfo) -> tuple[Ids, Logprobs]:
    """Token ids and logprobs, as many of one as of the other."""
    if meta_info.output_token_logprobs is not None:
        return _sglang_completion(meta_info.output_token_logprobs, meta_info.completion_tokens)
    if choice.token_ids == ABSENT or choice.logprobs is None:
        raise Upstream("the engine's answer has neither token_ids with logprobs nor meta_info.output_token_logprobs")
    ids, content = read_ids(bytes(choice.token_ids), "token_ids"), choice.logprobs.content
    if len(ids) != len(content):
        raise Upstream(f"the engine's answer has {len(ids)} token_ids but {len(content)} logprobs")
    if len(ids) and isinstance(content[0], NamedLogprob):
        _check_names(ids, content)
    return ids, np.array([token.logprob for token in content], np.float32)


def _sglang_completion(tokens: list[OutputToken], completion_tokens: int | None) -> tuple[Ids, Logprobs]:
    if completion_tokens != len(tokens):
        raise Upstream(f"meta_info has {len(tokens)} output_token_logprobs but completion_tokens {completion_tokens}")
    ids = np.array([token.token_id for token in tokens], np.int32)
    return ids, np.array([token.logprob for token in tokens], np.float32)


def _check_names(ids: Ids, content: list[NamedLogprob]) -> None:
    names = b"token_id:" + ids_text(ids).replace(b",", b",token_id:")
    if ",".join([token.token for token in content]).encode() != names:
        raise Upstream("the engine's answer has logprobs of other tokens than its token_ids")


def message_of(choice: Choice[Any]) -> bytes:
    """The message as JSON."""
    message = read_part(choice.message, MESSAGE, "message")
    if message.content is None and not message.tool_calls:
        raise Upstream("the engine's message has neither content nor tool calls")
    return bytes(choice.message)


def version_of(meta_info: MetaInfo) -> int | None:
    """SGLang's `weight_version` is a free text: a number where the trainer numbers its updates."""
    said = meta_info.weight_version
    if not isinstance(said, str):
        return said
    number = int(said) if said.isascii() and said.isdecimal() and len(said) <= len(str(MAX_VERSION)) else None
    return number if number is not None and number <= MAX_VERSION else None
