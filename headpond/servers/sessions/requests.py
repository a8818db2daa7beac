"""Requests of clients: bodies read within the limits, and chats, new sessions and seals decoded and checked."""

import asyncio
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec, TypeVar, cast

import msgspec
import orjson
from aiohttp import web
from multidict import CIMultiDictProxy

from headpond.config.engine import RESERVED
from headpond.config.sessions import LeaveOut, Sessions
from headpond.engines.http.transport import ON_LOOP_BYTES, Reservation
from headpond.errors import BadRequest, TooLarge, TooSlow
from headpond.event_loop.offload import in_cpu_thread
from headpond.playing.posted_scores import TurnRewards
from headpond.recording import DigestedMessages, Echo, digest_messages
from headpond.servers.sessions.apis import Api, History, Recorded
from headpond.servers.sessions.client_response import Asked
from headpond.spans import SPANS_MOST, TimedSpan
from headpond.turn import MAX_NESTING, Ids, is_nested_too_deeply

TRAIN_HEADER = "x-headpond-train"
# Fields with one meaning. Forcing one removes the other.
SYNONYMS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
SYSTEM_ROLES = ("system", "developer")


P = ParamSpec("P")
T = TypeVar("T")

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Handled here: streams are never requested from the engine; the dialect sends the rest in its own way.
NOT_SAMPLING = frozenset({"model", "messages", "tools", "stream", "stream_options"})
NO_MESSAGES = DigestedMessages(messages=[], forms=[])
IDENTITY = "identity"
# Limit for a request that creates a session. Any client may send it; it is parsed on the loop and kept.
NEW_SESSION_BYTES = 1 << 18
# `wbits` of zlib for each format of a compressed body.
WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# No control characters: the name is sent to the engine in a header.
Name = Annotated[str, msgspec.Meta(max_length=200, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]+\Z")]
FileName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,60}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


@dataclass(frozen=True, kw_only=True)
class ChatRules:
    defaults: Mapping[str, Any]
    forced: Mapping[str, Any]  # None removes a field.
    leave_out: Mapping[str, LeaveOut]

    @classmethod
    def of(cls, settings: Sessions, *, sampling: Mapping[str, Any], forced: Mapping[str, Any]) -> "ChatRules":
        """`sampling` and `forced` are those that the session was created with."""
        model = {} if settings.model is None else {"model": settings.model}
        return cls(defaults=sampling, forced={**model, **settings.forced, **forced}, leave_out=settings.leave_out)

    def applied(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        replaced = {SYNONYMS[name] for name in self.forced if name in SYNONYMS}
        decided = {name: value for name, value in {**self.defaults, **fields}.items() if name not in replaced}
        unset = {name for name, value in self.forced.items() if value is None}
        return {name: value for name, value in {**decided, **self.forced}.items() if name not in unset}

    def left_out_by(self, fields: Mapping[str, Any], headers: CIMultiDictProxy[str]) -> str:
        """Return the header or the rule that leaves a chat out of training; empty for a chat that is trained on.
        `fields` are the client's."""
        match headers.get(TRAIN_HEADER, "true").strip().lower():
            case "false":
                return TRAIN_HEADER
            case "true":
                return next((name for name, rule in self.leave_out.items() if _matches(rule, fields)), "")
            case other:
                raise BadRequest(f"{TRAIN_HEADER} must be true or false, not {other!r}")


def _matches(rule: LeaveOut, fields: Mapping[str, Any]) -> bool:
    messages = cast("list[Mapping[str, Any]]", fields.get("messages") or [])
    if rule.model is not None and not re.search(rule.model, str(fields.get("model") or "")):
        return False
    if rule.system is not None:
        texts = (_text(message) for message in messages if message.get("role") in SYSTEM_ROLES)
        if not re.search(rule.system, "\n\n".join(texts)):
            return False
    if rule.user is not None:
        last = next((message for message in reversed(messages) if message.get("role") == "user"), {})
        return re.search(rule.user, _text(last)) is not None
    return True


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = cast("list[Any]", content) if isinstance(content, list) else [{"text": content}]
    return "\n\n".join(text for part in parts if isinstance(text := part.get("text"), str))


class NewSession(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    rollout: Name | None = None  # default: the session's own id
    attempt: Count = 1
    run: FileName | None = None
    # id of the execution; sealed files are written into its directory. It needs `run` and
    # `rollout`
    execution: FileName | None = None
    sampling: dict[str, Any] = {}  # default fields of every chat
    model: Name | None = None  # model of every chat, whatever the client names
    forced: dict[str, Any] = {}  # fields of every chat, whatever the client sends; null removes one
    policy_version: Count | None = None  # newest version that was published
    least_version: Count = 0  # replicas with older weights serve no session that is trained on
    abandoned_versions: tuple[Count, ...] = ()  # nor do replicas with these
    sequence: Count = 0  # number of the job; the versions of the newest one are used


class SealRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    # why the rollout failed: its tokens are then masked from the loss
    error: Annotated[str, msgspec.Meta(max_length=10_000)] = ""
    turn_rewards: TurnRewards | None = None  # one for each recorded turn
    # spans of the rollout beside its turns
    spans: Annotated[tuple[TimedSpan, ...], msgspec.Meta(max_length=SPANS_MOST)] = ()


NEW_SESSION = msgspec.json.Decoder(NewSession)
SEAL = msgspec.json.Decoder(SealRequest)


@dataclass(frozen=True, kw_only=True)
class Chat:
    api: Api
    fields: Mapping[str, Any]
    conversation: DigestedMessages
    asked: Asked
    context: Any  # values of the request that the API's response needs
    instructions: int
    left_out_by: str  # header or rule that leaves it out of training; empty if it is recorded
    prompt_ids: Ids | None = None  # the prompt itself, in place of messages

    @property
    def sampling(self) -> dict[str, Any]:
        return {name: value for name, value in self.fields.items() if name not in NOT_SAMPLING}

    def answer(self, completion: bytes, id: str) -> bytes:
        """A recorded completion as the client asked for it."""
        recorded = Recorded(completion=completion, id=id, asked=self.asked, context=self.context)
        return self.api.stream(recorded) if self.asked.stream else self.api.response(recorded)


async def read_body(request: web.BaseRequest, reservation: Reservation, *, limit: int, timeout_s: float) -> bytes:
    """Received bytes count in the reservation, so a slow client holds only what it has sent."""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0
    try:
        async with asyncio.timeout(timeout_s):
            body = await _received(request, reservation, limit)
            encoding = request.headers.get("Content-Encoding", IDENTITY).strip().lower()
            return body if encoding == IDENTITY else await _decompressed(body, encoding, reservation, limit)
    except TimeoutError:
        raise TooSlow(f"the request's body did not arrive within {timeout_s:g} s (sessions.request_s)") from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the request's body cannot be read: {error}") from None


async def _received(request: web.BaseRequest, reservation: Reservation, limit: int) -> bytes:
    body = bytearray()
    async for chunk in request.content.iter_any():
        await reservation.reserve(len(chunk))
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


async def _decompressed(body: bytes, encoding: str, reservation: Reservation, limit: int) -> bytes:
    """A few kilobytes may decompress to gigabytes: no more than `limit` is, in a thread, once the bytes are reserved.
    aiohttp would decompress on the loop, before a handler knows of the request."""
    if encoding not in WINDOWS:
        raise BadRequest(f"content-encoding {encoding!r} is not supported: send gzip, deflate or none")
    await reservation.reserve(limit)
    return await in_cpu_thread(_decompress, body, WINDOWS[encoding], limit)


def _decompress(body: bytes, window: int, limit: int) -> bytes:
    decompressor = zlib.decompressobj(wbits=window)
    try:
        content = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadRequest(f"the request's body cannot be decompressed: {error}") from None
    if len(content) > limit:
        raise _too_large(limit)
    if not decompressor.eof or decompressor.unused_data:
        raise BadRequest("the request's compressed body is incomplete, or more follows it")
    return content


async def by_size(size: int, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Small bodies are handled on the loop: a thread would cost more than the work."""
    if size <= ON_LOOP_BYTES:
        return fn(*args, **kwargs)
    return await in_cpu_thread(fn, *args, **kwargs)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadRequest("the request is not a JSON object")
    if is_nested_too_deeply(body, lambda: parsed):
        raise BadRequest(f"the request is nested deeper than {MAX_NESTING} levels")
    return cast("dict[str, Any]", parsed)


def read_chat(
    api: Api,
    given: dict[str, Any],
    *,
    headers: CIMultiDictProxy[str],
    rules: ChatRules,
    history: History | None = None,
    echo: Echo = Echo.RECOGNISED,
) -> Chat:
    request = api.chat(given, history)
    fields = rules.applied(request.fields)
    _check(fields)
    ids = request.prompt_ids
    conversation = NO_MESSAGES if ids is not None else digest_messages(fields.get("messages"), echo)
    return Chat(
        api=api,
        fields=fields,
        conversation=conversation,
        asked=Asked.by(fields),
        context=request.context,
        instructions=request.instructions,
        left_out_by=rules.left_out_by(request.fields, headers),
        prompt_ids=ids,
    )


def _check(fields: Mapping[str, Any]) -> None:
    if not isinstance(fields.get("stream"), bool | None):
        raise BadRequest("stream must be true or false")
    if not isinstance(fields.get("model"), str | None):
        raise BadRequest("model must be a string")
    count, temperature = fields.get("n"), fields.get("temperature")
    if count is True or count not in (None, 1):
        raise BadRequest("n must be 1: a request records one completion; use several sessions for several completions")
    if not isinstance(temperature, int | float | None) or isinstance(temperature, bool):
        raise BadRequest("temperature must be a number")


def read_new_session(body: bytes) -> NewSession:
    new = decoded(body, NEW_SESSION)
    for name, fields, use in (("sampling", new.sampling, "a default"), ("forced", new.forced, "forced")):
        if is_nested_too_deeply(body, lambda fields=fields: fields):
            raise BadRequest(f"{name} is nested deeper than {MAX_NESTING} levels")
        if refused := sorted(RESERVED & fields.keys()):
            raise BadRequest(f"{name}: {', '.join(refused)} cannot be {use}; remove it")
    if new.execution and not (new.run and re.fullmatch("[A-Za-z0-9_-]+", new.rollout or "")):
        raise BadRequest("execution needs a run, and a rollout of letters, digits, _ and -")
    return new


def decoded(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    try:
        return decoder.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the request cannot be read: {error}") from None


def _too_large(limit: int) -> TooLarge:
    instead = "" if limit == NEW_SESSION_BYTES else ", or raise sessions.request_bytes"
    return TooLarge(f"the request has more than {limit} bytes: send less{instead}")
