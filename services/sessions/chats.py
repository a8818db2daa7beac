"""A chat, in the order of its contract: claim, read, prepare, send, commit; the slot is free again on every way out."""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from aiohttp import web

from penstock.config import RunConfig
from penstock.engines.cuts import EXPERTS_KEY
from penstock.engines.dialects import Endpoint, dialect_of
from penstock.engines.response import RequestInfo, read_turn
from penstock.engines.sampling import altered_sampling
from penstock.engines.transport import ON_LOOP_BYTES, ByteBudget
from penstock.errors import BadRequest, PolicyFailure
from penstock.ids import engine_session
from penstock.recording import Claim, Prepared, Session
from penstock.runtime.offload import in_cpu_thread
from penstock.turn import TurnMetadata
from services.sessions import headers
from services.sessions.backend import Answered, Asked, Backend
from services.sessions.event_stream import EVENT_STREAM
from services.sessions.exchange import Answer, Exchange
from services.sessions.rendering import prompt_ids, renderer_of
from services.sessions.requests import Chat, read_body, read_chat
from services.sessions.session_table import Entry, Notes, opened

logger = logging.getLogger("penstock.sessions")

P = ParamSpec("P")
T = TypeVar("T")

CUT_ON_LOOP_BYTES = 1 << 21
"""Joining, cutting and decoding the new rows of an answer of 1.3 MB takes 0.6 ms; through a thread a chat of that size
cost a fifth more CPU (302-314 instead of 245-273 chats/s)."""
HEAD_CHUNKS = 2
"""of up to 256 KiB: a socket's first read may be short"""
SESSION_HEADER = "X-Session-ID"
"""By which an engine, or what stands before several, may keep a conversation together."""


@dataclass(kw_only=True)
class ChatCounts:
    begun: int = 0
    recorded: int = 0
    refused_upstream: int = 0
    """answered by the engine with something else than 200"""


class Chats:
    def __init__(self, config: RunConfig, backend: Backend, requests: ByteBudget) -> None:
        self.counts = ChatCounts()
        self._config = config
        self._backend = backend
        self._requests = requests
        self._renderer = renderer_of(config)
        self._dialect = dialect_of(config.engine, renderer=self._renderer)

    async def answer(self, request: web.BaseRequest, entry: Entry, notes: Notes) -> web.Response:
        session = opened(entry)
        with session.claim() as claim, self._requests.reservation() as reservation:
            self.counts.begun += 1
            limits = self._config.sessions
            body = await read_body(request, reservation, limit=limits.request_bytes, timeout_s=limits.request_s)
            chat = await _sized(len(body), read_chat, body, notes.sampling)
            prepared = self._prepared(session, claim, chat)
            info = await self._request_info(prepared, chat)
            required = self._dialect.required_fields(info.prompt_ids, info.routes_from)
            sent = await _sized(len(body), chat.body, required, model=self._config.engine.model)
            del body
            passed = self._headers(request, session, notes)
            asked = Asked(method="POST", target=Endpoint.CHAT, body=sent, headers=passed)
            async with self._backend.ask(asked, home=entry.home) as answered:
                entry.home = answered.replica
                if answered.status != 200:
                    self.counts.refused_upstream += 1
                    return passed_on(answered)
                exchange = _exchange(chat, sent, prepared, info)
                if is_quick(answered.chunks):
                    answer = exchange.answer(answered)
                else:
                    answer = await in_cpu_thread(exchange.answer, answered)
                metadata = _metadata(answered, chat.fields)
                await self._commit(session, claim, prepared, answer, metadata)
            return _response(answered, answer, stream=chat.stream)

    def _prepared(self, session: Session, claim: Claim, chat: Chat) -> Prepared:
        most = self._config.policy.max_turns
        if session.turns >= most:
            raise BadRequest(f"turn limit: the session has had its {most} turns")
        return session.prepare(claim, chat.asked)

    async def _commit(
        self, session: Session, claim: Claim, prepared: Prepared, answer: Answer, metadata: TurnMetadata
    ) -> None:
        """A session that was closed meanwhile records nothing; its client gets the answer all the same."""
        try:
            if await session.commit(claim, prepared, answer.turn, metadata, record=answer.record):
                self.counts.recorded += 1
        except PolicyFailure as failure:
            raise BadRequest(str(failure)) from failure

    async def warm_up(self) -> None:
        """Its renderer is built before the first chat; ConfigError for one that will never work."""
        if self._renderer:
            await self._renderer.warm_up()

    def _headers(self, request: web.BaseRequest, session: Session, notes: Notes) -> Mapping[str, str]:
        own_key = self._config.engine.api_key is not None
        passed = headers.to_upstream(request.headers, notes.secret_digest, own_key=own_key)
        passed.setdefault(SESSION_HEADER, engine_session(session.settings.rollout, session.settings.attempt))
        passed["Content-Type"] = "application/json"
        return passed

    async def _request_info(self, prepared: Prepared, chat: Chat) -> RequestInfo:
        limit = self._config.policy.max_seq_len
        if self._renderer is None:
            return RequestInfo(max_seq_len=limit)
        ids = await prompt_ids(self._renderer, prepared, chat)
        return RequestInfo(prompt_ids=ids, routes_from=prepared.routes_from, max_seq_len=limit)


def _exchange(chat: Chat, sent: bytes, prepared: Prepared, info: RequestInfo) -> Exchange:
    read = functools.partial(
        read_turn, open_samples=prepared.open_samples, request=info, route_format=prepared.route_format
    )
    return Exchange(request=sent, read=read, stream=chat.stream, logprobs=chat.wants_logprobs)


def passed_on(answered: Answered) -> web.Response:
    """The engine's own words, whatever they are."""
    return web.Response(status=answered.status, headers=headers.to_client(answered.headers), body=answered.joined())


def _response(answered: Answered, answer: Answer, *, stream: bool) -> web.Response:
    passed = headers.to_client(answered.headers)
    if stream:
        passed["Content-Type"], passed["Cache-Control"] = EVENT_STREAM, "no-cache"
    return web.Response(headers=passed, body=answer.body)


def _metadata(answered: Answered, fields: Mapping[str, Any]) -> TurnMetadata:
    temperature = fields.get("temperature")
    return TurnMetadata(
        engine=answered.replica.url,
        version_sent=answered.version_sent,
        version_received=answered.replica.version,
        temperature=1.0 if temperature is None else float(temperature),
        sampling=altered_sampling(fields),
    )


def is_quick(chunks: list[bytes]) -> bool:
    """Whether reading an answer takes no longer than the way to a thread. What takes time is what stands before the
    routed experts, all in the first chunks: base64 is cut out unread."""
    size = sum(map(len, chunks))
    if size <= ON_LOOP_BYTES:
        return True
    before = b"".join(chunks[:HEAD_CHUNKS])[:ON_LOOP_BYTES] if size <= CUT_ON_LOOP_BYTES else b""
    key = before.find(EXPERTS_KEY)
    return key >= 0 and before[key + len(EXPERTS_KEY) :][:1] in (b'"', b"{")


async def _sized(size: int, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Small bodies are treated at once: a thread would cost more than the work."""
    if size <= ON_LOOP_BYTES:
        return fn(*args, **kwargs)
    return await in_cpu_thread(fn, *args, **kwargs)
