"""One chat request, from claim to commit: claim the session, read, prepare, send, record, respond.

The claim is released on every exit. A failed chat records nothing.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson
from aiohttp import web
from msgspec import structs

from headpond.config import RunConfig
from headpond.engines.dialects import Prompt, dialect_of
from headpond.engines.dialects.base import finish_reason
from headpond.engines.http.transport import ON_LOOP_BYTES, SESSION_HEADER, ByteBudget
from headpond.engines.responses.response import RequestInfo, read_turn
from headpond.errors import Aborted, BadRequest, ContextFull, PolicyFailure, SessionError, Upstream
from headpond.event_loop.offload import in_cpu_thread
from headpond.ids import engine_session
from headpond.playing.policy import count_use, named_adapter, prompt_of, rendered_message, turn_metadata
from headpond.recording import Claim, Prepared, Session
from headpond.renderers import PooledRenderer
from headpond.servers.sessions import headers
from headpond.servers.sessions.apis import CHAT, Api
from headpond.servers.sessions.backend import Backend, EngineRequest, EngineResponse
from headpond.servers.sessions.chat_records import answer_id_of, history_of, record_of, recorded_completion
from headpond.servers.sessions.client_response import Rendered, completion_for, rendered_logprobs
from headpond.servers.sessions.error_responses import CONTEXT_CODE, engine_error, error_response
from headpond.servers.sessions.keep_alive import EVENT_STREAM, KEEP_ALIVES, KeepAlives, WatchedResponse
from headpond.servers.sessions.requests import Chat, ChatRules, by_size, read_body, read_chat, read_object
from headpond.servers.sessions.retries import Answer, Attempt, SentChat, request_id
from headpond.servers.sessions.session_table import Entry, SessionMetadata, SessionTable, opened
from headpond.spans import Stopwatch
from headpond.turn import Body, Ids, Turn, TurnMetadata, ids_text

logger = logging.getLogger("headpond.sessions")

# Joining, cutting and decoding the new rows of a response of 1.3 MB takes 0.6 ms. In a thread, a chat of that size
# cost a fifth more CPU (302-314 instead of 245-273 chats/s).
CUT_ON_LOOP_BYTES = 1 << 21
EXCERPT_BYTES = 64
# A chunk has up to 256 KiB. A socket's first read may be short.
HEAD_CHUNKS = 2


@dataclass(kw_only=True)
class ChatCounts:
    begun: int = 0
    recorded: int = 0
    refused_upstream: int = 0  # the engine answered with a status other than 200
    # the engine aborted the completion: nothing was recorded, and the client got 503
    aborted: int = 0
    repaired_echoes: int = 0  # recorded answers that came back in another form
    # prompts whose chat template changed recorded tokens, and no bridge kept them: each
    # begins another sample
    rewritten_histories: int = 0
    sent_again: int = 0  # requests that joined one in flight or got a recorded answer
    left_out: int = 0  # answered and logged, and not trained on, by a rule or a header


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A chat as it was sent to the engine."""

    chat: Chat
    prompt: Prompt
    prepared: Prepared
    sent: bytes
    answer_id: str


@dataclass(frozen=True, kw_only=True)
class ReadResponse:
    """An engine's response, validated."""

    turn: Turn
    body: Body  # the client's response
    record: bytes  # request and response as JSON, for the session's records


class Chats:
    def __init__(
        self,
        config: RunConfig,
        backend: Backend,
        requests: ByteBudget,
        table: SessionTable,
        renderer: PooledRenderer | None,
    ) -> None:
        self.counts = ChatCounts()
        self._config = config
        self._backend = backend
        self._requests = requests
        self._table = table
        self._renderer = renderer
        self._fields = tuple(field.name for field in config.batch.fields_of("turn"))
        self._dialect = dialect_of(config.engine, renderer=self._renderer, place=config.place_of("engine", "dialect"))

    async def handle(self, request: web.BaseRequest, entry: Entry, metadata: SessionMetadata, api: Api) -> web.Response:
        session, attempt = opened(entry), Attempt.of(request)
        with contextlib.ExitStack() as places:
            claim = None
            if not (session.full and entry.sent_chats.may_join(attempt)):
                claim = await self._claim(session, places)
            reservation, limits = places.enter_context(self._requests.reservation()), self._config.sessions
            body = await read_body(request, reservation, limit=limits.request_bytes, timeout_s=limits.request_s)
            agent = headers.agent_of(request)
            id = request_id(agent if api is CHAT else f"{agent}\0{api.path}", body)
            earlier = entry.sent_chats.find(session, id, attempt)
            chat = await self._read_chat(request, session, metadata, api, body)
            if chat.asked.stream:
                request[KEEP_ALIVES] = KeepAlives(request, api, limits.keep_alive_s)
            if earlier is not None:
                self.counts.sent_again += 1
                answer = await self._answer_of(earlier, session, chat, request)
                return self._response(request, entry, answer)
            claim = claim or await self._claim(session, places)
            size, body = len(body), b""  # not kept while the engine answers
            sent_chat = SentChat(id=id, key=attempt.key, request=request)
            entry.sent_chats.add(sent_chat)
            try:
                answer = await self._play(claim, entry, metadata, chat, sent_chat, agent, size=size)
            except BaseException as error:
                sent_chat.fail(error if isinstance(error, SessionError) else Upstream("the first request was ended"))
                entry.sent_chats.remove(sent_chat)
                raise
            if isinstance(answer, web.Response):
                sent_chat.fail(Upstream("the engine refused the request that this one repeats: send it again"))
                entry.sent_chats.remove(sent_chat)
                return answer
            sent_chat.answer.set_result(answer)
            return self._response(request, entry, answer, sent_chat)

    async def _read_chat(
        self, request: web.BaseRequest, session: Session, metadata: SessionMetadata, api: Api, body: bytes
    ) -> Chat:
        given = await by_size(len(body), read_object, body)
        history = await history_of(session, api, given)
        rules = ChatRules.of(self._config.sessions, sampling=metadata.sampling, forced=metadata.forced)
        return await by_size(
            len(body),
            read_chat,
            api,
            given,
            headers=request.headers,
            rules=rules,
            history=history,
            echo=session.settings.echo,
        )

    async def _claim(self, session: Session, places: contextlib.ExitStack) -> Claim:
        await session.place()
        claim = places.enter_context(session.claim())
        self.counts.begun += 1
        return claim

    async def _play(
        self,
        claim: Claim,
        entry: Entry,
        metadata: SessionMetadata,
        chat: Chat,
        sent_chat: SentChat,
        agent: str,
        *,
        size: int,
    ) -> Answer | web.Response:
        """Return the engine's own error as a response: it is not recorded."""
        session = opened(entry)
        prepared = self._prepare(session, claim, chat, agent, sent_chat.id)
        prompt = await self._prompt(session, prepared, chat)
        self.counts.rewritten_histories += prompt.rewritten
        model, version = await named_adapter(self._dialect, self._backend.replicas, chat.fields.get("model"))
        sent = await by_size(size, self._dialect.request_body, prompt, chat.sampling, model=model)
        passed = self._headers(sent_chat.request, session, metadata)
        target = self._dialect.endpoint
        engine_request = EngineRequest(
            method="POST", target=target, body=sent, headers=passed, dialect=self._dialect, version=version
        )
        watch = Stopwatch()
        async with self._backend.send(engine_request, preferred=entry.last_replica) as response:
            before, entry.last_replica = entry.last_replica, response.replica
            if response.status != 200:
                self.counts.refused_upstream += 1
                return self._refusal(response, chat.api)
            answer_id = answer_id_of(session, prepared.arrival)
            exchange = Exchange(chat=chat, prompt=prompt, prepared=prepared, sent=sent, answer_id=answer_id)
            try:
                read = await self._read(response, exchange)
                self._backend.check_name(response)
            except Aborted as error:  # 503: the client's SDK sends the request again
                self.counts.aborted += 1
                entry.aborts += 1
                entry.usage.lost(response.replica.url, error.sampled_tokens)
                raise
            count_use(entry.usage, response.replica, before, read.turn, response.seconds)
            turn_info = turn_metadata(
                chat.fields,
                response.replica,
                version=response.version,
                answered_at=response.answered_at,
                request=watch.stop(),
                agent=agent,
            )
            overlong = read.turn.overlong_prompt
            if chat.left_out_by:
                await self._leave_out(session, chat, read)
            elif not (overlong and session.turns):  # as the first turn, it says why there is nothing to train on
                await self._commit(session, claim, prepared, read, turn_info, sent_chat.key)
            if overlong:
                limit = self._config.policy.max_seq_len
                raise ContextFull(f"the prompt has more than {limit} tokens (policy.max_seq_len)")
        return Answer(turn=claim.turn, headers=_client_headers(response.headers, chat), body=bytes(read.body))

    async def _prompt(self, session: Session, prepared: Prepared, chat: Chat) -> Prompt:
        if chat.prompt_ids is not None:
            return Prompt(messages=[{"role": "user", "content": ""}], ids=self._sendable(chat.prompt_ids))
        messages = await session.restored(prepared, chat.conversation.messages)
        tools = chat.fields.get("tools")
        return await prompt_of(self._renderer, prepared, messages, tools=tools, fields=chat.fields)

    async def _answer_of(
        self, earlier: SentChat | int, session: Session, chat: Chat, request: web.BaseRequest
    ) -> Answer:
        if isinstance(earlier, SentChat):
            return await earlier.join(request)
        completion = await recorded_completion(session, earlier)
        body = chat.answer(completion, answer_id_of(session, session.arrival_of(earlier)))
        return Answer(turn=earlier, headers=_client_headers({"Content-Type": "application/json"}, chat), body=body)

    def _refusal(self, response: EngineResponse, api: Api) -> web.Response:
        """The engine's own error, in the client's API."""
        if api is CHAT:
            return forwarded(response)
        text = engine_error(response.joined())
        code = CONTEXT_CODE if self._dialect.is_context_limit(text) else ""
        return error_response(response.status, text, code=code, api=api)

    async def _leave_out(self, session: Session, chat: Chat, read: ReadResponse) -> None:
        self.counts.left_out += 1
        logger.info(
            "action=left_out session=%s by=%s tokens=%d",
            session.settings.session,
            chat.left_out_by,
            len(read.turn.completion_ids),
        )
        await session.leave_out(read.record)

    def _response(
        self, request: web.BaseRequest, entry: Entry, answer: Answer, sent_chat: SentChat | None = None
    ) -> web.Response:
        def written() -> None:
            if answer.turn is not None:
                self._table.see(entry, answer.turn)
            if sent_chat:
                entry.sent_chats.remove(sent_chat)

        return WatchedResponse(request, written, headers=answer.headers, body=answer.body)

    def _prepare(self, session: Session, claim: Claim, chat: Chat, agent: str, id: bytes) -> Prepared:
        limit = self._config.policy.max_turns
        if session.begun > limit:  # the chat itself has begun
            raise ContextFull(f"turn limit: the session has used its {limit} turns (policy.max_turns)")
        if chat.left_out_by:
            return session.unrecorded(chat.conversation)
        messages = chat.conversation if chat.prompt_ids is None else None
        return session.prepare(claim, messages, agent=agent, request_id=id)

    def _sendable(self, prompt_ids: Ids) -> Ids:
        if self._renderer is None or not self._dialect.takes_tokens:
            raise BadRequest(
                "prompt: this server sends messages; for token ids set policy.renderer, and engine.dialect to generate "
                "or sglang"
            )
        return prompt_ids

    async def _read(self, response: EngineResponse, exchange: Exchange) -> ReadResponse:
        if is_quick(response.chunks, self._dialect.experts_key):
            read = self._read_turn(response, exchange)
        else:
            read = await in_cpu_thread(self._read_turn, response, exchange)
        if read.turn.message is not None:
            return read
        fields, number = exchange.chat.fields, exchange.prepared.arrival
        if exchange.chat.prompt_ids is not None and self._renderer:
            texts = await self._renderer.texts(read.turn.completion_ids)
            message = {"role": "assistant", "content": "".join(texts)}
        else:
            message = await rendered_message(self._dialect, exchange.prompt, read.turn, number=number, fields=fields)
        turn = structs.replace(read.turn, message=orjson.dumps(message))
        logprobs = None
        if self._renderer and "logprobs" in exchange.chat.asked.names:
            choices = await by_size(len(read.body), self._dialect.logprobs, read.body)
            logprobs = await rendered_logprobs(self._renderer, choices, fields)
        return await by_size(len(read.body), self._for_client, read.body, turn, exchange, logprobs)

    def _read_turn(self, response: EngineResponse, exchange: Exchange) -> ReadResponse:
        """Runs in a thread too."""
        body, prompt, prepared = response.joined(), exchange.prompt, exchange.prepared
        info = RequestInfo(
            dialect=self._dialect,
            prompt_ids=prompt.ids,
            routes_from=prompt.routes_from,
            max_seq_len=self._config.policy.max_seq_len,
            fields=self._fields,
            renders=prompt.ids is not None,
        )
        turn = read_turn(body, request=info, open_samples=prepared.open_samples, route_format=prepared.route_format)
        if turn.message is None:
            return ReadResponse(turn=turn, body=body, record=b"")
        return self._for_client(body, turn, exchange)

    def _for_client(
        self, engine_body: Body, turn: Turn, exchange: Exchange, logprobs: bytes | None = None
    ) -> ReadResponse:
        asked = exchange.chat.asked
        rendered = None
        if exchange.prompt.ids is not None and turn.message is not None:
            ids = b"[%b]" % ids_text(turn.completion_ids)
            rendered = Rendered(
                message=turn.message, finish_reason=finish_reason(turn), logprobs=logprobs, token_ids=ids
            )
        completion = completion_for(self._dialect.chat_completion(engine_body, turn), asked, rendered)
        return ReadResponse(
            turn=turn,
            body=exchange.chat.answer(completion, exchange.answer_id),
            record=record_of(self._dialect.endpoint, exchange.chat, exchange.sent, completion),
        )

    def _headers(self, request: web.BaseRequest, session: Session, metadata: SessionMetadata) -> Mapping[str, str]:
        own_key = self._config.engine.api_key is not None
        passed = headers.to_upstream(request.headers, metadata.digests, own_key=own_key)
        passed.setdefault(SESSION_HEADER, engine_session(session.settings.rollout, session.settings.attempt))
        passed["Content-Type"] = "application/json"
        return passed

    async def _commit(
        self,
        session: Session,
        claim: Claim,
        prepared: Prepared,
        read: ReadResponse,
        metadata: TurnMetadata,
        key: str,
    ) -> None:
        """If the session was closed meanwhile, nothing is recorded; the client still gets the response."""
        repaired = session.repaired_echoes
        try:
            if await session.commit(claim, prepared, read.turn, metadata, record=read.record, seen=False, key=key):
                self.counts.recorded += 1
                self.counts.repaired_echoes += session.repaired_echoes - repaired
        except PolicyFailure as failure:
            raise BadRequest(str(failure)) from failure


async def open_renderer(config: RunConfig) -> PooledRenderer | None:
    """Return the renderer, ready for the first chat. Raise ConfigError if it cannot work."""
    if (settings := config.policy.renderer) is None:
        return None
    renderer = PooledRenderer.of(settings, config.engine.model)
    await renderer.pool()
    return renderer


def forwarded(response: EngineResponse) -> web.Response:
    """The engine's response, unchanged except for hop-by-hop headers."""
    body = bytes(response.joined())
    return web.Response(status=response.status, headers=headers.to_client(response.headers), body=body)


def _client_headers(passed: Mapping[str, str], chat: Chat) -> Mapping[str, str]:
    kept = headers.to_client(passed)
    if chat.asked.stream:
        kept.update(EVENT_STREAM)
    return kept


def is_quick(chunks: Sequence[Body], experts_key: bytes) -> bool:
    """Whether reading a response takes less time than a thread switch. The cost is in the logprobs before or behind the
    routed experts: base64 is cut out unread, and known prompt ids are hashed."""
    size = sum(map(len, chunks))
    if size <= ON_LOOP_BYTES:
        return True
    if size > CUT_ON_LOOP_BYTES or not experts_key:
        return False
    before = chunks[0] if len(chunks) == 1 else b"".join(chunk[:ON_LOOP_BYTES] for chunk in chunks[:HEAD_CHUNKS])
    key = before.find(experts_key, 0, ON_LOOP_BYTES)
    value = key + len(experts_key)
    quoted = key >= 0 and before[value : min(value + 1, ON_LOOP_BYTES)] in (b'"', b"{")
    return quoted and b'"' not in _excerpt(chunks, ON_LOOP_BYTES)


def _excerpt(chunks: Sequence[Body], distance: int) -> Body:
    """A few bytes at a distance from the end. Within logprobs they have a quote, within base64 and ids none."""
    for chunk in reversed(chunks):
        if len(chunk) >= distance:
            at = len(chunk) - distance
            return chunk[at : at + EXCERPT_BYTES]
        distance -= len(chunk)
    return b""
