"""The base of all dialects, and their shared helpers for OpenAI-like chats and parts of a response."""

import contextlib
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import msgspec
import numpy as np
import orjson

from headpond.config.engine import Engine
from headpond.engines.weights import ControlCalls
from headpond.errors import BadRequest, SessionError, StageError, Upstream, error_boundary
from headpond.renderers.protocol import NO_VALUES, TemplateValues, Tools
from headpond.turn import Body, Ids, Logprobs, Message, Turn, VersionSpan, ids_text

if TYPE_CHECKING:
    from headpond.renderers import PooledRenderer

logger = logging.getLogger("headpond.engines")

MAX_TOKEN_ID = 2**31 - 1
"""Token ids are stored as i32."""
LOGPROB_ROUNDING = 1e-3
"""Engines round: a logprob may exceed 0 by this."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
Logprob = Annotated[float, msgspec.Meta(ge=float(np.finfo(np.float32).min), le=LOGPROB_ROUNDING)]
ABSENT = msgspec.Raw(b"null")
NO_IDS, NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)
ABORT = "abort"
"""The finish reason of both servers for a completion that they ended: a pause, an abort request, a shutdown."""
CHAT_PATH = "/v1/chat/completions"
CONTEXT_LIMIT = ("context length", "context_length", "maximum model length")
"""Phrases in the error messages of vLLM, SGLang and OpenAI."""
A_DICT = "return a dict, the JSON object of the request"


NEUTRAL = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}
"""Sampling parameters that change the distribution, with the values that leave it unchanged. The trainer computes
probabilities of the unchanged one, so importance ratios of other turns are off."""


def altered_sampling(sampling: Mapping[str, Any]) -> str:
    """The parameters that change the distribution, as JSON. Each combination is logged once."""
    altered = altered_parameters(sampling)
    if altered:
        warn_once(", ".join(sorted(altered)))
    return orjson.dumps(altered, option=orjson.OPT_SORT_KEYS).decode()


def altered_parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, neutral in NEUTRAL.items()
        if (value := sampling.get(name)) is not None and value not in neutral
    }


@functools.cache
def warn_once(names: str) -> None:
    logger.warning(
        "action=altered_sampling fields=%s: the trainer's probabilities are of another distribution; ratios are off",
        names,
    )


@dataclass(frozen=True, kw_only=True)
class Prompt:
    messages: Sequence[Message]
    tools: Tools = None
    ids: Ids | None = None
    """Token ids, if a renderer made them."""
    values: TemplateValues = field(default_factory=lambda: NO_VALUES)
    """The request's `chat_template_kwargs`, if a renderer uses them."""
    routes_from: int = 0
    """First routed row to request; 0 unless `ids` begin with those of the previous turn."""
    rewritten: bool = False
    """Whether the renderer could not keep the tokens of the previous turn: the chat template changes history."""


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one response. Raw parts are ABSENT if the server did not send them."""

    completion_ids: Ids
    completion_logprobs: Logprobs
    """One per id."""
    prompt_ids: msgspec.Raw = ABSENT
    """A JSON list. If absent, the ids of the request are used."""
    routed_experts: msgspec.Raw = ABSENT
    """Routed experts in any form that `headpond.engines.responses.routed_experts` reads."""
    sampling_mask: msgspec.Raw = ABSENT
    """A JSON list of lists: for each completion token, the ids that it was drawn from."""
    message: bytes | None = None
    """The assistant's message as JSON; None from token-in/token-out, because the renderer makes it."""
    finish_reason: str | None = None
    version: int | None = None
    """Policy version of the weights when the completion ended, if the response states only that."""
    version_spans: tuple[VersionSpan, ...] = ()
    """The versions of all completion tokens, in order, if the response states them. They are then
    exact."""
    final: bool = True
    """False if the server aborted the completion. It is continued from its tokens, or the request
    is repeated."""


class Dialect(ABC):
    """The API of one kind of server: its request, and the places of the recorded parts in its
    response.

    There is one instance per process. Several threads call `read` at once.
    """

    endpoint: ClassVar[str]
    """Path of the request, below the engine's URL."""
    absent_hint: ClassVar[str] = ""
    """The remedy if the server lacks the endpoint."""
    takes_messages: ClassVar[bool] = True
    """Whether prompts can be sent as messages. If False, they are sent as tokens: `policy.renderer`
    is required."""
    takes_tokens: ClassVar[bool] = False
    """Whether `Prompt.ids` can be sent. If so, `policy.renderer` is allowed."""
    prompt_key: ClassVar[bytes] = b""
    """Text directly before the first prompt id in a response, as the server prints it
    (`"prompt_token_ids":[`).

    Both keys only save time: routed experts, and ids that an earlier turn has, are then skipped
    instead of parsed.
    """
    experts_key: ClassVar[bytes] = b""
    """Text directly before the routed experts in a response (`"routed_experts":`)."""
    checks_values: ClassVar[bool] = False
    """Whether `read` checks each id and logprob, by `TokenId` and `Logprob`. If not, they are
    checked afterwards."""
    context_limit: ClassVar[tuple[str, ...]] = CONTEXT_LIMIT
    """Lower-case texts. An HTTP 4xx that contains one refuses a prompt for its length."""
    control: ClassVar[ControlCalls] = ControlCalls()
    """The calls that read the version of the server's weights, and load others."""

    def __init__(self, settings: Engine, *, renderer: "PooledRenderer | None" = None) -> None:
        self.settings = settings
        self.renderer = renderer

    @abstractmethod
    def request_fields(self, prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object of a request, without the model. It must ask for ids and logprobs,
        whatever `sampling` contains.

        `sampling` has OpenAI's names (`temperature`, `max_tokens`) and those of
        `policy.sampling.more`.
        """

    @abstractmethod
    def read(self, text: bytes) -> ResponseFields:
        """Decode a response. `Upstream` or msgspec's DecodeError if it is malformed.

        `text` has placeholders at the keys' places. Return prompt ids and routed experts as
        `msgspec.Raw` of it, undecoded.
        """

    def boundary(self, method: str, *passing: type[Exception]) -> contextlib.AbstractContextManager[None]:
        """A context that turns the errors of a method into StageError: the same request would fail again.

        Headpond's own errors and `passing` go through: they concern the request or the response.
        """
        name = f"{type(self).__module__}:{type(self).__qualname__}"
        return error_boundary(StageError, f"the dialect {name} failed in {method}", SessionError, *passing)

    def request_body(self, prompt: Prompt, sampling: Mapping[str, Any], *, model: str | None = None) -> bytes:
        """The request as JSON. StageError if `request_fields` fails, BadRequest if JSON has no form
        for the caller's values."""
        with self.boundary("request_fields"):
            fields: Any = self.request_fields(prompt, sampling)
            if not isinstance(fields, dict):
                raise StageError(f"{type(self).__name__}.request_fields returned a {type(fields).__name__}: {A_DICT}")
        request = {"model": model or self.settings.model, **fields}
        try:
            return orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise BadRequest(f"the request is not JSON-serializable: {error}") from error

    def named(self, body: bytes, name: str) -> bytes:
        """The body with the request's name, which the response is to repeat.

        Only servers that ignore the header `X-Request-Id` need it.
        """
        return body

    def is_context_limit(self, error: str) -> bool:
        """Whether an HTTP 4xx with this body refuses the prompt for its length."""
        return any(phrase in error.lower() for phrase in self.context_limit)

    def logprobs(self, body: Body) -> "Sequence[TokenChoice]":
        """The tokens of a response that names them by id, each with the most likely ones at its
        place."""
        return ()

    def chat_completion(self, body: Body, turn: Turn) -> bytes:
        """The response for a session's client: OpenAI's chat completion, without the parts that
        only training needs."""
        assert turn.message is not None
        message, tokens = orjson.Fragment(turn.message), (turn.prompt_tokens, len(turn.completion_ids))
        usage = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), (*tokens, sum(tokens)), strict=True))
        return orjson.dumps(
            {
                "id": f"chatcmpl-{turn.sequence.ids_digest:032x}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self.settings.model,
                "choices": [
                    {
                        "index": 0,
                        "message": message,
                        "logprobs": None,
                        "finish_reason": finish_reason(turn),
                    }
                ],
                "usage": usage,
            }
        )


class ChatDialect(Dialect):
    """A server with OpenAI's chat API. A session's client gets its responses unchanged, but without
    routed experts."""

    endpoint: ClassVar[str] = CHAT_PATH
    prompt_key: ClassVar[bytes] = b'"prompt_token_ids":['
    experts_key: ClassVar[bytes] = b'"routed_experts":'

    @abstractmethod
    def required_fields(self, prompt: Prompt) -> dict[str, Any]:
        """The request fields that recording needs in the response. They override the caller's."""

    def request_fields(self, prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
        tools = {"tools": prompt.tools} if prompt.tools else {}
        fields = {"messages": prompt.messages, **tools, **sampling, **self.required_fields(prompt)}
        if fields.get("top_logprobs", 0) is None:  # an agent's null; vLLM to 0.28 then sends no logprobs
            del fields["top_logprobs"]
        return fields

    def chat_completion(self, body: Body, turn: Turn) -> bytes:
        return without_routes(body, turn)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChoice:
    """A sampled token, and the most likely tokens at its place."""

    id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


class TokenLogprob(msgspec.Struct, gc=False):
    """An entry of `logprobs.content`. It names its token by text. The text is not compared with the
    ids."""

    logprob: Logprob


class TokenLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class AnyObject(msgspec.Struct):
    pass


class ChatMessage(msgspec.Struct):
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[AnyObject] | None = None


TOKEN_IDS = msgspec.json.Decoder(list[TokenId])
MESSAGE = msgspec.json.Decoder(ChatMessage)

Value = TypeVar("Value")


def finish_reason(turn: Turn) -> str | None:
    """The finish reason of OpenAI's API: `tool_calls` if a renderer found calls in the completion."""
    calls = turn.message is not None and bool(orjson.loads(turn.message).get("tool_calls"))
    return "tool_calls" if calls and turn.finish_reason == "stop" else turn.finish_reason


def only_choice(choices: Sequence[Value]) -> Value:
    if len(choices) != 1:
        raise Upstream(f"the engine answered with {len(choices)} choices: exactly one can be recorded")
    return choices[0]


def read_completion(
    token_ids: msgspec.Raw, content: Sequence[TokenLogprob] | None, finish_reason: str | None = None
) -> tuple[Ids, Logprobs]:
    """A choice's `token_ids` and `logprobs.content`, as arrays of equal length.

    A completion that was aborted before its first token may have neither.
    """
    if token_ids == ABSENT or content is None:
        if finish_reason == ABORT:
            return NO_IDS, NO_LOGPROBS
        raise Upstream(
            "the engine's response has no token_ids with logprobs; is engine.dialect right? vLLM must be 0.22.0 or "
            "newer"
        )
    ids = read_ids(bytes(token_ids), "token_ids")
    if len(ids) != len(content):
        raise Upstream(f"the engine's response has {len(ids)} token_ids but {len(content)} logprobs")
    return ids, np.array([token.logprob for token in content], np.float32)


def read_message(raw: msgspec.Raw) -> bytes:
    """The assistant's message as JSON. Null content is valid: a reasoning parser sends it while the
    thought goes on."""
    message = read_part(raw, MESSAGE, "message")
    if message.content is msgspec.UNSET and not message.tool_calls:
        raise Upstream("the engine's message has neither content nor tool calls")
    return bytes(raw)


def read_ids(raw: bytes, name: str) -> Ids:
    """A JSON list of ids as an array. A compact list is read directly, any other by type, which
    reports its faults."""
    ids = compact_ids(raw)
    return np.array(read_part(raw, TOKEN_IDS, name), np.int32) if ids is None else ids


def compact_ids(raw: bytes) -> Ids | None:
    """The ids of a JSON list of only digits and commas; None for any other value."""
    if raw[:1] != b"[":
        return None
    return NO_IDS if raw == b"[]" else listed_ids(raw[1:-1])


def listed_ids(text: bytes) -> Ids | None:
    """The ids of a text that is exactly `ids_text` of one or more; None for any other."""
    try:
        ids = np.fromstring(text, np.int32, sep=",")
    except ValueError:
        return None
    return ids if ids_text(ids) == text and text and b"-" not in text else None


def read_part(raw: bytes | memoryview | msgspec.Raw, decoder: msgspec.json.Decoder[Value], name: str) -> Value:
    """Decode a part of a response. msgspec's error has the path inside the part only, so the part
    is named here."""
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise Upstream(f"the engine's response is malformed: {error} of {name}") from None


def without_routes(body: Body, turn: Turn) -> bytes:
    """The engine's body, byte for byte, with `null` in place of the routed experts."""
    if turn.routes_span is None:
        return bytes(body)
    start, end = turn.routes_span
    return b"".join([memoryview(body)[:start], b"null", memoryview(body)[end:]])
