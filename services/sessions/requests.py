"""What a client asks for: its body within the limits, a chat found fit to be sent, a new session's wishes."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import orjson
from aiohttp import web

from penstock.config.engine import RESERVED
from penstock.engines.transport import Reservation
from penstock.errors import BadRequest, TooLarge, TooSlow
from penstock.recording import DigestedMessages, digest_messages

T = TypeVar("T")

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Answered by us: what is asked of the engine is never a stream.
OURS = frozenset({"stream", "stream_options"})
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
FileName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,60}$")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class NewSession(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    rollout: Name | None = None
    """default: the session's own id"""
    attempt: Count = 1
    run: FileName | None = None
    execution: FileName | None = None
    """with `run` and `rollout`: sealed files are put where those of that execution belong"""
    sampling: dict[str, Any] = {}
    """defaults of every chat's request"""
    policy_version: Count | None = None
    """the newest, for engines that do not name their own"""


class SealRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    error: Annotated[str, msgspec.Meta(max_length=10_000)] = ""
    """why the rollout ended badly: nothing of it is then trained on"""


NEW_SESSION = msgspec.json.Decoder(NewSession)
SEAL = msgspec.json.Decoder(SealRequest)


@dataclass(frozen=True, kw_only=True)
class Chat:
    fields: Mapping[str, Any]
    asked: DigestedMessages
    stream: bool
    wants_logprobs: bool

    def body(self, demanded: Mapping[str, Any], *, model: str) -> bytes:
        """For the engine: what is demanded of it cannot be switched off."""
        fields = {name: value for name, value in self.fields.items() if name not in OURS}
        return orjson.dumps({"model": model, **fields, **demanded}, option=orjson.OPT_SERIALIZE_NUMPY)


async def read_body(request: web.BaseRequest, reservation: Reservation, *, limit: int, timeout_s: float) -> bytes:
    """What has arrived counts in the reservation; a client that is slow holds only that."""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0
    try:
        async with asyncio.timeout(timeout_s):
            return await _received(request, reservation, limit)
    except TimeoutError:
        raise TooSlow(f"the request's body did not arrive within {timeout_s:g} s") from None
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


def read_chat(body: bytes, defaults: Mapping[str, Any]) -> Chat:
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise BadRequest("the request is not a JSON object")
    fields: dict[str, Any] = {**defaults, **read}
    _check(fields)
    return Chat(
        fields=fields,
        asked=digest_messages(fields.get("messages")),
        stream=bool(fields.get("stream")),
        wants_logprobs=bool(fields.get("logprobs")),
    )


def _check(fields: Mapping[str, Any]) -> None:
    if not isinstance(fields.get("stream"), bool | None):
        raise BadRequest("stream must be true or false")
    count, temperature = fields.get("n"), fields.get("temperature")
    if count is True or count not in (None, 1):
        raise BadRequest("n must be 1: exactly one answer can be recorded; send several requests to several sessions")
    if not isinstance(temperature, int | float | None) or isinstance(temperature, bool):
        raise BadRequest("temperature must be a number")


def read_new_session(body: bytes) -> NewSession:
    asked = _decoded(body, NEW_SESSION)
    if refused := sorted(RESERVED & asked.sampling.keys()):
        raise BadRequest(f"sampling: {', '.join(refused)} cannot be a default")
    if asked.execution and not (asked.run and re.fullmatch("[A-Za-z0-9_-]+", asked.rollout or "")):
        raise BadRequest("execution: needs a run and a rollout of letters, digits, _ and -")
    return asked


def read_seal(body: bytes) -> SealRequest:
    return _decoded(body, SEAL)


def _decoded(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    try:
        return decoder.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the request cannot be read: {error}") from None


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request has more than {limit} bytes: raise sessions.request_bytes if that is meant")
