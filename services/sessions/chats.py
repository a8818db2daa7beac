"""One chat request, from claim to commit: claim the session, read, prepare, send, record, respond.

The claim is released on every exit. A failed chat records nothing.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import orjson
from aiohttp import web

from penstock.config import RunConfig
from penstock.engines.dialects import Prompt, dialect_of
from penstock.engines.response import RequestInfo, read_turn
from penstock.engines.transport import ON_LOOP_BYTES, SESSION_HEADER, ByteBudget
from penstock.errors import Aborted, BadRequest, Invariant, PolicyFailure
from penstock.ids import engine_session
from penstock.playing.turns import named_adapter, prompt_ids, rendered_message, turn_metadata
from penstock.recording import Claim, Prepared, Session
from penstock.renderers import PooledRenderer, RendererKey, RendererPools
from penstock.renderers.protocol import begins_with
from penstock.runtime.offload import in_cpu_thread
from penstock.turn import Turn, TurnMetadata
from services.sessions import headers
from services.sessions.backend import Backend, EngineRequest, EngineResponse
from services.sessions.event_stream import EVENT_STREAM, as_event_stream
from services.sessions.requests import Chat, read_body, read_chat
from services.sessions.session_table import Entry, SessionMetadata, opened

P = ParamSpec("P")
T = TypeVar("T")

CUT_ON_LOOP_BYTES = 1 << 21
"""Joining, cutting and decoding the new rows of a response of 1.3 MB takes 0.6 ms; in a thread, a chat of that size
cost a fifth more CPU (302-314 instead of 245-273 chats/s)."""
EXCERPT_BYTES = 64
HEAD_CHUNKS = 2
"""of up to 256 KiB: a socket's first read may be short"""


@dataclass(kw_only=True)
class ChatCounts:
    begun: int = 0
    recorded: int = 0
    refused_upstream: int = 0
    """the engine answered with a status other than 200"""
    aborted: int = 0
    """the engine aborted the completion: nothing was recorded, and the client got 503"""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A chat as it was sent to the engine."""

    chat: Chat
    prompt: Prompt
    prepared: Prepared
    sent: bytes


@dataclass(frozen=True, kw_only=True)
class ReadResponse:
    """An engine's response, validated."""

    turn: Turn
    body: bytes
    """for the client"""
    record: bytes
    """request and response as JSON, for the session's records"""


class Chats:
    def __init__(self, config: RunConfig, backend: Backend, requests: ByteBudget) -> None:
        self.counts = ChatCounts()
        self._config = config
        self._backend = backend
        self._requests = requests
        self._renderer = renderer_of(config)
        self._fields = tuple(field.name for field in config.batch.fields_of("turn"))
        self._dialect = dialect_of(config.engine, renderer=self._renderer, place=config.place_of("engine", "dialect"))

    async def warm_up(self) -> None:
        """Build the renderer before the first chat. Raises ConfigError if that cannot work."""
        if self._renderer:
            await self._renderer.warm_up()

    async def handle(self, request: web.BaseRequest, entry: Entry, metadata: SessionMetadata) -> web.Response:
        session = opened(entry)
        with session.claim() as claim, self._requests.reservation() as reservation:
            self.counts.begun += 1
            limits = self._config.sessions
            body = await read_body(request, reservation, limit=limits.request_bytes, timeout_s=limits.request_s)
            chat = await _by_size(len(body), read_chat, body, metadata.sampling)
            prepared = self._prepare(session, claim, chat)
            prompt = await self._prompt(prepared, chat)
            model, version = chat.fields.get("model"), None
            if model in (None, self._config.engine.model):
                adapter, version = await named_adapter(self._dialect, self._backend.replicas)
                model = adapter or model
            sent = await _by_size(len(body), self._dialect.request_body, prompt, chat.sampling, model=model)
            del body
            passed = self._headers(request, session, metadata)
            target = self._dialect.endpoint
            engine_request = EngineRequest(method="POST", target=target, body=sent, headers=passed, version=version)
            async with self._backend.send(engine_request, preferred=entry.last_replica) as response:
                entry.last_replica = response.replica
                if response.status != 200:
                    self.counts.refused_upstream += 1
                    return forwarded(response)
                exchange = Exchange(chat=chat, prompt=prompt, prepared=prepared, sent=sent)
                try:
                    read = await self._read(response, exchange)
                except Aborted:  # 503: the client's SDK sends the request again
                    self.counts.aborted += 1
                    raise
                turn_info = turn_metadata(
                    chat.fields,
                    response.replica,
                    version=response.version,
                    answered_at=response.answered_at,
                )
                await self._commit(session, claim, prepared, read, turn_info)
            return _client_response(response, read, stream=chat.stream)

    def _prepare(self, session: Session, claim: Claim, chat: Chat) -> Prepared:
        limit = self._config.policy.max_turns
        if session.turns >= limit:
            raise BadRequest(f"turn limit: the session has used its {limit} turns (policy.max_turns)")
        return session.prepare(claim, chat.conversation)

    async def _prompt(self, prepared: Prepared, chat: Chat) -> Prompt:
        messages, tools = chat.conversation.messages, chat.fields.get("tools")
        if self._renderer is None:
            return Prompt(messages=messages, tools=tools)
        ids = await prompt_ids(self._renderer, prepared, messages, tools)
        if len(prepared.history_ids) and not begins_with(ids, prepared.history_ids):
            raise Invariant(
                "the chat template rewrites earlier messages: for this model, remove policy.renderer and set "
                'sessions.mode = "open"'
            )
        return Prompt(messages=messages, tools=tools, ids=ids, routes_from=prepared.routes_from)

    async def _read(self, response: EngineResponse, exchange: Exchange) -> ReadResponse:
        if is_quick(response.chunks, self._dialect.experts_key):
            read = self._read_turn(response, exchange)
        else:
            read = await in_cpu_thread(self._read_turn, response, exchange)
        if read.turn.message is not None:
            return read
        message = await rendered_message(self._dialect, exchange.prompt, read.turn)
        turn = replace(read.turn, message=orjson.dumps(message))
        return await _by_size(len(read.body), self._for_client, read.body, turn, exchange)

    def _read_turn(self, response: EngineResponse, exchange: Exchange) -> ReadResponse:
        """Runs in a thread too."""
        body, prompt, prepared = response.joined(), exchange.prompt, exchange.prepared
        info = RequestInfo(
            dialect=self._dialect,
            prompt_ids=prompt.ids,
            routes_from=prompt.routes_from,
            max_seq_len=self._config.policy.max_seq_len,
            fields=self._fields,
        )
        turn = read_turn(body, request=info, open_samples=prepared.open_samples, route_format=prepared.route_format)
        if turn.message is None:
            return ReadResponse(turn=turn, body=body, record=b"")
        return self._for_client(body, turn, exchange)

    def _for_client(self, engine_body: bytes, turn: Turn, exchange: Exchange) -> ReadResponse:
        body, chat = self._dialect.chat_completion(engine_body, turn), exchange.chat
        return ReadResponse(
            turn=turn,
            body=as_event_stream(body, logprobs=chat.wants_logprobs) if chat.stream else body,
            record=_record(self._dialect.endpoint, exchange.sent, body),
        )

    def _headers(self, request: web.BaseRequest, session: Session, metadata: SessionMetadata) -> Mapping[str, str]:
        own_key = self._config.engine.api_key is not None
        passed = headers.to_upstream(request.headers, metadata.secret_digest, own_key=own_key)
        passed.setdefault(SESSION_HEADER, engine_session(session.settings.rollout, session.settings.attempt))
        passed["Content-Type"] = "application/json"
        return passed

    async def _commit(
        self, session: Session, claim: Claim, prepared: Prepared, read: ReadResponse, metadata: TurnMetadata
    ) -> None:
        """If the session was closed meanwhile, nothing is recorded; the client still gets the response."""
        try:
            if await session.commit(claim, prepared, read.turn, metadata, record=read.record):
                self.counts.recorded += 1
        except PolicyFailure as failure:
            raise BadRequest(str(failure)) from failure


def renderer_of(config: RunConfig) -> PooledRenderer | None:
    settings = config.policy.renderer
    return PooledRenderer(RendererPools(), RendererKey.of(settings, config.engine.model)) if settings else None


def _record(path: str, request: bytes, response: bytes) -> bytes:
    """Both are valid JSON, so nothing is parsed."""
    return b'{"timestamp":%.6f,"method":"POST","path":"%b","status_code":200,"request":%b,"response":%b}' % (
        time.time(),
        path.encode(),
        request,
        response,
    )


def forwarded(response: EngineResponse) -> web.Response:
    """The engine's response, unchanged except for hop-by-hop headers."""
    return web.Response(status=response.status, headers=headers.to_client(response.headers), body=response.joined())


def _client_response(response: EngineResponse, read: ReadResponse, *, stream: bool) -> web.Response:
    passed = headers.to_client(response.headers)
    if stream:
        passed["Content-Type"], passed["Cache-Control"] = EVENT_STREAM, "no-cache"
    return web.Response(headers=passed, body=read.body)


def is_quick(chunks: list[bytes], experts_key: bytes) -> bool:
    """Whether reading a response takes less time than a thread switch. The cost is in the logprobs before or behind the
    routed experts: base64 is cut out unread, and known prompt ids are hashed."""
    size = sum(map(len, chunks))
    if size <= ON_LOOP_BYTES:
        return True
    before = b"".join(chunks[:HEAD_CHUNKS])[:ON_LOOP_BYTES] if size <= CUT_ON_LOOP_BYTES else b""
    key = before.find(experts_key) if experts_key else -1
    quoted = key >= 0 and before[key + len(experts_key) :][:1] in (b'"', b"{")
    return quoted and b'"' not in _excerpt(chunks, ON_LOOP_BYTES)


def _excerpt(chunks: list[bytes], distance: int) -> bytes:
    """A few bytes at a distance from the end. Within logprobs they have a quote, within base64 and ids none."""
    for chunk in reversed(chunks):
        if len(chunk) >= distance:
            at = len(chunk) - distance
            return chunk[at : at + EXCERPT_BYTES]
        distance -= len(chunk)
    return b""


async def _by_size(size: int, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Small bodies are handled on the loop: a thread would cost more than the work."""
    if size <= ON_LOOP_BYTES:
        return fn(*args, **kwargs)
    return await in_cpu_thread(fn, *args, **kwargs)
