"""The base of all dialects: the request, the JSON types that their responses share, and how each part is checked.

A chat response is decoded before it is clear whether vLLM or SGLang wrote it, so `Choice` has the fields of both.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import orjson

from penstock.config.engine import Engine
from penstock.errors import BadRequest, Upstream
from penstock.renderers.protocol import NextTurn, Tools
from penstock.turn import Ids, Logprobs, Message

MAX_TOKEN_ID = MAX_VERSION = 2**31 - 1
"""Both are stored as i32."""
LOGPROB_ROUNDING = 1e-3
"""Engines round: a logprob may exceed 0 by this much."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
Logprob = Annotated[float, msgspec.Meta(ge=float(np.finfo(np.float32).min), le=LOGPROB_ROUNDING)]
Version = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
ABSENT = msgspec.Raw(b"null")


class Endpoint(StrEnum):
    """Path of a request. vLLM and SGLang both serve CHAT."""

    CHAT = "/v1/chat/completions"
    GENERATE = "/inference/v1/generate"


class AsyncRenderer(Protocol):
    """Converts messages to tokens and back, for engines that take tokens. `penstock.renderers` implements it."""

    async def prompt_ids(self, turn: NextTurn) -> Ids:
        """The tokens of the previous turn, unchanged, followed by those of the new messages; if the renderer cannot
        extend the previous turn, the tokens of all messages."""
        ...

    async def message(self, completion_ids: Ids, *, prompt_ids: Ids, tools: Tools) -> Message:
        """The completion as an assistant's message."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prompt:
    messages: Sequence[Message]
    tools: Tools = None
    ids: Ids | None = None
    """Set if a renderer made them."""
    routes_from: int = 0
    """First routed row to request; 0 unless `ids` begin with those of the previous turn."""


class TokenLogprob(msgspec.Struct, gc=False):
    logprob: Logprob


AnyLogprob = TypeVar("AnyLogprob", bound=TokenLogprob)


class TokenLogprobs(msgspec.Struct, Generic[AnyLogprob]):
    content: list[AnyLogprob]

    def check_tokens(self, ids: Ids) -> None:
        """`Upstream` if the logprobs name other tokens than `ids`. A chat names them by text, which is not compared."""


class OutputToken(msgspec.Struct, array_like=True, gc=False):
    """SGLang's `[logprob, token_id, ...]`."""

    logprob: Logprob
    token_id: TokenId


class MetaInfo(msgspec.Struct):
    """SGLang's part of a choice."""

    output_token_logprobs: list[OutputToken] | None = None
    completion_tokens: int | None = None
    weight_version: str | Version | None = None
    routed_experts: msgspec.Raw = ABSENT


AnyLogprobs = TypeVar("AnyLogprobs", bound=TokenLogprobs[Any])


class Choice(msgspec.Struct, Generic[AnyLogprobs]):
    message: msgspec.Raw = ABSENT
    logprobs: AnyLogprobs | None = None
    token_ids: msgspec.Raw = ABSENT
    prompt_token_ids: msgspec.Raw = ABSENT
    routed_experts: msgspec.Raw = ABSENT
    finish_reason: str | None = None
    meta_info: MetaInfo | None = None


class ResponseBody(msgspec.Struct, Generic[AnyLogprobs]):
    choices: list[Choice[AnyLogprobs]]
    prompt_token_ids: msgspec.Raw = ABSENT

    def only_choice(self) -> Choice[AnyLogprobs]:
        if len(self.choices) != 1:
            raise Upstream(f"the engine answered with {len(self.choices)} choices: exactly one can be recorded")
        return self.choices[0]


class AnyObject(msgspec.Struct):
    pass


class ChatMessage(msgspec.Struct):
    content: str | None = None
    tool_calls: list[AnyObject] | None = None


TOKEN_IDS = msgspec.json.Decoder(list[TokenId])
MESSAGE = msgspec.json.Decoder(ChatMessage)


class Dialect(ABC):
    """The API of one kind of server: its request, and where its response has ids, logprobs, version and routes.

    The defaults are those of an OpenAI chat with vLLM's `token_ids`. One instance per process.
    """

    endpoint: ClassVar[Endpoint] = Endpoint.CHAT
    decoder: ClassVar["msgspec.json.Decoder[ResponseBody[Any]]"] = msgspec.json.Decoder(
        ResponseBody[TokenLogprobs[TokenLogprob]]
    )

    def __init__(self, settings: Engine, *, renderer: AsyncRenderer | None = None) -> None:
        self.settings = settings
        self.renderer = renderer

    def request_body(self, prompt: Prompt, sampling: Mapping[str, Any]) -> bytes:
        try:
            request = {"model": self.settings.model, **self.request_fields(prompt, sampling)}
            return orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise BadRequest(f"the request is not JSON-serializable: {error}") from error

    def request_fields(self, prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
        tools = {"tools": prompt.tools} if prompt.tools else {}
        required = self.required_fields(prompt.ids, prompt.routes_from)
        return {"messages": prompt.messages, **tools, **sampling, **required}

    @abstractmethod
    def required_fields(self, ids: Ids | None = None, routes_from: int = 0) -> dict[str, Any]:
        """The request fields without which the response cannot be recorded. They override the caller's."""

    @staticmethod
    def completion(choice: Choice[Any]) -> tuple[Ids, Logprobs]:
        """Token ids and logprobs, of equal length."""
        if choice.token_ids == ABSENT or choice.logprobs is None:
            raise Upstream(
                "the engine's response has neither token_ids with logprobs nor meta_info.output_token_logprobs"
            )
        ids, content = read_ids(bytes(choice.token_ids), "token_ids"), choice.logprobs.content
        if len(ids) != len(content):
            raise Upstream(f"the engine's response has {len(ids)} token_ids but {len(content)} logprobs")
        choice.logprobs.check_tokens(ids)
        return ids, np.array([token.logprob for token in content], np.float32)

    @staticmethod
    def routed_experts(choice: Choice[Any]) -> msgspec.Raw:
        return choice.routed_experts

    @staticmethod
    def version(choice: Choice[Any]) -> int | None:
        """Policy version of the weights, if the response states one."""
        return None


def read_message(choice: Choice[Any]) -> bytes:
    """The assistant's message as JSON."""
    message = read_part(choice.message, MESSAGE, "message")
    if message.content is None and not message.tool_calls:
        raise Upstream("the engine's message has neither content nor tool calls")
    return bytes(choice.message)


def read_ids(raw: bytes, name: str) -> Ids:
    """A JSON list of ids: directly to an array if compact, else by type, which reports what is wrong with it."""
    ids = compact_ids(raw)
    return np.array(read_part(raw, TOKEN_IDS, name), np.int32) if ids is None else ids


def compact_ids(raw: bytes) -> Ids | None:
    """The ids of a JSON list of only digits and commas; None for any other value."""
    text = raw[1:-1]
    if raw[:1] != b"[" or text.translate(None, b"0123456789,"):
        return None
    if not text:
        return np.empty(0, np.int32)
    ids = np.fromstring(text, np.int64, sep=",")
    return ids.astype(np.int32) if ids.max() <= MAX_TOKEN_ID else None


Value = TypeVar("Value")


def read_part(raw: bytes | memoryview | msgspec.Raw, decoder: msgspec.json.Decoder[Value], name: str) -> Value:
    """Decode a part of a response. msgspec's error gives the path inside the part, so the part is named here."""
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise Upstream(f"the engine's response is malformed: {error} of {name}") from None
