"""The session server: its routes, authorization, errors in the form of their API, and the life of its process.

On SIGINT or SIGTERM it stops listening, gives chats in flight `sessions.drain_s` to finish, and leaves open sessions on
disk for the next process.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from urllib.parse import unquote

import orjson
from aiohttp import web

from headpond.config import RunConfig
from headpond.config.engine import Engine
from headpond.engines.http.transport import UNREACHABLE, ByteBudget, Reservation
from headpond.engines.replicas.selection import Orders
from headpond.errors import (
    UNWRITTEN,
    BadRequest,
    BlobMissing,
    BlobUnwritten,
    EngineUnreachable,
    HeadpondError,
    NotFound,
    SessionError,
    Unauthorised,
    Upstream,
)
from headpond.event_loop import factory as event_loop
from headpond.event_loop import garbage
from headpond.event_loop.loop_lag import LoopLag
from headpond.event_loop.offload import in_io_thread
from headpond.processes import descriptors
from headpond.renderers import PooledRenderer
from headpond.servers import listening
from headpond.servers.sessions import headers
from headpond.servers.sessions.apis import APIS, MESSAGES, Api, api_of
from headpond.servers.sessions.backend import Backend, EngineRequest
from headpond.servers.sessions.chats import Chats, forwarded, open_renderer
from headpond.servers.sessions.connections import JsonServer
from headpond.servers.sessions.engine_queries import MODELS, EngineQueries
from headpond.servers.sessions.error_responses import JSON, error_response, response_to
from headpond.servers.sessions.keep_alive import KEEP_ALIVES
from headpond.servers.sessions.requests import NEW_SESSION_BYTES, SEAL, ChatRules, decoded, read_body, read_new_session
from headpond.servers.sessions.session_directory import SessionDirectory, owner_of
from headpond.servers.sessions.session_table import Entry, SessionMetadata, SessionTable, opened
from headpond.store import open_store
from headpond.turn import ids_text

logger = logging.getLogger("headpond.sessions")

COUNT_TOKENS = f"{MESSAGES.path}/count_tokens"
HOST = re.compile(r"(\[[0-9A-Fa-f:.%]{2,60}\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?")
# Requests that need a session's control secret.
CONTROL = frozenset({("DELETE", ""), ("POST", "/seal"), ("POST", "/rewards")})
# Threads for file writes. Each write takes 1 to 2 ms.
CONCURRENCY = 32

Handler = Callable[[web.BaseRequest, Entry, SessionMetadata], Awaitable[web.Response]]


def serve(config: RunConfig) -> None:
    """Serve until SIGINT or SIGTERM."""
    event_loop.run(_serve(config), concurrency=CONCURRENCY, cpu_threads=config.sessions.cpu_workers)


async def _serve(config: RunConfig) -> None:
    stopping = event_loop.stop_requested()
    async with serving(config):
        await stopping.wait()


@contextlib.asynccontextmanager
async def serving(config: RunConfig) -> AsyncIterator["tuple[SessionServer, str]"]:
    """A server of this process and its URL."""
    listener = listening.bind(config.sessions.host, config.sessions.port)
    owner = owner_of(config.sessions.instance_id, listener.getsockname()[1])
    directory = SessionDirectory(open_store(config.store_url), owner)
    await in_io_thread(directory.lock)
    table = SessionTable(directory, config, await in_io_thread(directory.recoverable))
    lag = config.lag.watch("sessions")
    connections, engine = _shared_descriptors(config)
    async with Backend.open(engine) as backend:
        backend.wait_s = config.sessions.engine_wait_s
        server = SessionServer(config, table, backend, lag, await open_renderer(config))
        runner = web.ServerRunner(_http_server(server, config, connections), shutdown_timeout=config.sessions.drain_s)
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(lag.run()), group.create_task(table.watch())]
            try:
                with garbage.seldom_collection():
                    yield server, await _listen(runner, listener, server, config)
            finally:
                await runner.cleanup()
                for task in background:
                    task.cancel()
                await table.finish()


def _http_server(server: "SessionServer", config: RunConfig, connections: int) -> JsonServer:
    line, settings = config.sessions.header_bytes, config.sessions
    return JsonServer(
        server.handle,
        connections=connections,
        address_connections=settings.address_connections,
        access_log=None,
        max_line_size=line,
        max_field_size=line,
        auto_decompress=False,
        keepalive_timeout=settings.request_s,  # also the time limit of a head: aiohttp has no other
    )


def _shared_descriptors(config: RunConfig) -> tuple[int, Engine]:
    """Most connections of clients, and the engine's settings with those that are left for it."""
    clients, engine = config.sessions.connections, config.engine
    files = descriptors.raise_to(descriptors.BASE + clients + engine.connections, lower="sessions.connections")
    free = max(2, files - descriptors.BASE)
    if clients + engine.connections > free:
        clients = min(clients, free // 2)
        engine = engine.model_copy(update={"connections": min(engine.connections, free - clients)})
    return clients, engine


async def _listen(runner: web.ServerRunner, listener: socket.socket, server: "SessionServer", config: RunConfig) -> str:
    """The server's URL."""
    await runner.setup()
    await web.SockSite(runner, listener, backlog=listening.BACKLOG).start()
    url = listening.url_of(listener)
    logger.info(
        "action=sessions_ready url=%s instance=%s engine=%s recoverable=%d secrets=%s",
        url,
        server.instance_id,
        ",".join(config.engine.urls),
        len(server.table),
        "required" if config.sessions.needs_secret else "not required",
    )
    return url


class SessionServer:
    def __init__(
        self,
        config: RunConfig,
        table: SessionTable,
        backend: Backend,
        lag: LoopLag,
        renderer: PooledRenderer | None,
    ) -> None:
        self.table = table
        self._config = config
        self._settings = config.sessions
        self._backend = backend
        self._lag = lag
        self._requests = ByteBudget(self._settings.requests_bytes)
        self._chats = Chats(config, backend, self._requests, table, renderer)
        self._queries = EngineQueries(config, backend, renderer)
        self.refused = Counter[str]()  # Responses of 4xx and 5xx, the engine's included, by status.
        self.instance_id = self._settings.instance_id or secrets.token_hex(16)
        self._health = orjson.dumps({"status": "ok", "session_server_instance_id": self.instance_id})
        self._handlers: dict[tuple[str, str], Handler] = {
            ("GET", ""): self._show,
            ("DELETE", ""): self._delete,
            ("POST", "/seal"): self._seal,
            ("POST", "/rewards"): self._score,
            ("POST", COUNT_TOKENS): self._count_tokens,
            ("GET", MODELS): self._proxy,
            **{("POST", api.path): self._chat for api in APIS},
        }
        for path in self._settings.proxy_allow:
            for method in ("GET", "POST"):
                self._handlers.setdefault((method, path), self._proxy)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            response = await self._answer(request, api_of(request.rel_url.raw_path))
        except BaseException:
            if keep_alives := request.get(KEEP_ALIVES):
                keep_alives.cancel()
            raise
        if response.status >= 400:
            self.refused[str(response.status)] += 1
        return await keep_alives.end(response) if (keep_alives := request.get(KEEP_ALIVES)) else response

    async def _answer(self, request: web.BaseRequest, api: Api) -> web.StreamResponse:
        try:
            return await self._route(request)
        except SessionError as error:
            return response_to(type(error)(self._without_addresses(error)), api)
        except BlobMissing:  # the session was closed while its files were read
            return error_response(NotFound.status_code, f"session not found: {request.path}", api=api)
        except BlobUnwritten as error:
            logger.error("action=store_unwritten path=%s error=%s", request.path, error)
            return error_response(UNWRITTEN, str(error), api=api)
        except EngineUnreachable as error:
            return error_response(Upstream.status_code, f"{UNREACHABLE}: {self._without_addresses(error)}", api=api)
        except HeadpondError as error:
            logger.error("action=chat_failed path=%s error=%s", request.path, error)
            return error_response(500, self._without_addresses(error), api=api)
        except ConnectionError:  # the client left before its request was read, and does not get this response
            return error_response(400, "the connection closed before the request was complete")

    def _without_addresses(self, error: HeadpondError) -> str:
        """An agent learns the address of no replica; the log has it."""
        text = named = str(error)
        for url in self._config.engine.urls:
            text = text.replace(url, "the engine").replace(url.partition("://")[2], "the engine")
        if text != named:
            logger.warning("action=engine_failed error=%s", named)
        return text

    async def _route(self, request: web.BaseRequest) -> web.Response:
        path = request.rel_url.raw_path
        match (request.method, path.split("/", 3)):
            case "GET", ["", "health"]:
                return web.Response(body=self._health, content_type=JSON)
            case "GET", ["", "status"]:
                return _json(self._status())
            case "POST", ["", "sessions"]:
                return await self._create(request)
            case method, ["", "sessions", id, *rest]:
                below, _ = headers.split_branch("/" + rest[0] if rest else "")
                one_model = method == "GET" and below.startswith(f"{MODELS}/")
                handler = self._model if one_model else self._handlers.get((method, below))
                entry = await self.table.find(id)
                metadata = self._authorize(request, entry, control=(method, below) in CONTROL)
                self.table.touch(entry)
                if handler is None:
                    raise NotFound(f"there is no {method} {path}")
                return await handler(request, entry, metadata)
            case method, _:
                raise NotFound(f"there is no {method} {path}")

    def _authorize(self, request: web.BaseRequest, entry: Entry, *, control: bool) -> SessionMetadata:
        """Check the secret. An agent has the one for chats; requests that decide about its rollout need the other one,
        on loopback too."""
        metadata = entry.metadata
        assert metadata is not None
        controls = headers.has_secret(request.headers, metadata.control_digest)
        if control and not controls:
            raise Unauthorised(
                "rewards, sealing and deleting need the session's control secret: send control_secret, which "
                "POST /sessions returned, as bearer token"
            )
        if (
            self._settings.needs_secret
            and not controls
            and not headers.has_secret(request.headers, metadata.secret_digest)
        ):
            raise Unauthorised(
                "the session's secret is required: send it as bearer token or as x-api-key; POST /sessions returned it"
            )
        return metadata

    async def _create(self, request: web.BaseRequest) -> web.Response:
        key = self._settings.create_key
        if key and not headers.has_secret(request.headers, headers.digest(key.get_secret_value())):
            raise Unauthorised("creating a session needs the server's sessions.create_key: send it as bearer token")
        host = _host(request)
        new = read_new_session(await self._body(request, NEW_SESSION_BYTES))
        entry, secret, control = await self.table.create(new)
        if new.policy_version is not None:
            orders = Orders(
                run=new.run or "",
                sequence=new.sequence,
                version=new.policy_version,
                least_version=new.least_version,
                abandoned=new.abandoned_versions,
            )
            self._backend.replicas.follow(orders)
        base_url = f"{request.scheme}://{host}/sessions/{entry.id}/v1"
        created = {"session_id": entry.id, "base_url": base_url, "secret": secret, "control_secret": control}
        return _json(orjson.dumps(created))

    async def _chat(self, request: web.BaseRequest, entry: Entry, metadata: SessionMetadata) -> web.Response:
        try:
            async with entry.in_flight.request(lambda: self.table.gone(entry.id)):
                return await self._chats.handle(request, entry, metadata, api_of(request.rel_url.raw_path))
        finally:
            self.table.touch(entry)

    async def _count_tokens(self, request: web.BaseRequest, entry: Entry, metadata: SessionMetadata) -> web.Response:
        with self._requests.reservation() as reservation:
            body = await self._read(request, reservation)
            async with entry.in_flight.request(lambda: self.table.gone(entry.id)):
                count = await self._queries.count_tokens(request, opened(entry), body, self._rules(metadata))
                return _json(orjson.dumps({"input_tokens": count}))

    async def _model(self, request: web.BaseRequest, entry: Entry, metadata: SessionMetadata) -> web.Response:
        below, _ = headers.split_branch(request.rel_url.raw_path.removeprefix(f"/sessions/{entry.id}"))
        async with entry.in_flight.request(lambda: self.table.gone(entry.id)):
            return _json(await self._queries.model(unquote(below.removeprefix(f"{MODELS}/")), self._rules(metadata)))

    def _rules(self, metadata: SessionMetadata) -> ChatRules:
        return ChatRules.of(self._settings, sampling=metadata.sampling, forced=metadata.forced)

    async def _show(self, _: web.BaseRequest, entry: Entry, __: SessionMetadata) -> web.Response:
        session = opened(entry)
        settings = session.settings
        records = await session.records()
        details = {
            "accumulated_token_ids": orjson.Fragment(b"[%b]" % ids_text(session.token_ids())),
            "rollout": settings.rollout,
            "attempt": settings.attempt,
            "mode": settings.mode,
            "turns": session.turns,
            "repaired_echoes": session.repaired_echoes,
            "unseen_turns": session.unseen_turns,
            "left_out": [orjson.Fragment(record) for record in await session.records_left_out()],
        }
        shown = {
            "session_id": entry.id,
            "records": [orjson.Fragment(record) for record in records],
            "metadata": details,
        }
        return _json(await in_io_thread(orjson.dumps, shown))

    async def _delete(self, _: web.BaseRequest, entry: Entry, __: SessionMetadata) -> web.Response:
        await self.table.delete(entry)
        return web.Response(status=204)

    async def _seal(self, request: web.BaseRequest, entry: Entry, _: SessionMetadata) -> web.Response:
        seal = decoded(await self._body(request), SEAL)
        return _json(await self.table.seal(entry, seal, version_after=self._backend.replicas.after))

    async def _score(self, request: web.BaseRequest, entry: Entry, _: SessionMetadata) -> web.Response:
        await self.table.post_score(entry, await self._body(request))
        return web.Response(status=204)

    async def _proxy(self, request: web.BaseRequest, entry: Entry, metadata: SessionMetadata) -> web.Response:
        body = await self._body(request)
        own_key = self._backend.settings.api_key is not None
        passed = headers.to_upstream(request.headers, metadata.digests, own_key=own_key)
        target, _ = headers.split_branch(request.rel_url.raw_path_qs.removeprefix(f"/sessions/{entry.id}"))
        engine_request = EngineRequest(method=request.method, target=target, body=body, headers=passed)
        async with (
            entry.in_flight.request(lambda: self.table.gone(entry.id)),
            self._backend.send(engine_request, preferred=entry.last_replica) as response,
        ):
            return forwarded(response)

    async def _body(self, request: web.BaseRequest, limit: int | None = None) -> bytes:
        with self._requests.reservation() as reservation:
            return await self._read(request, reservation, limit)

    async def _read(self, request: web.BaseRequest, reservation: Reservation, limit: int | None = None) -> bytes:
        limits = self._settings
        most = min(limits.request_bytes, limit or limits.request_bytes)
        return await read_body(request, reservation, limit=most, timeout_s=limits.request_s)

    def _status(self) -> bytes:
        received, requests, limits = self._backend.budget, self._requests, self._settings
        return orjson.dumps(
            {
                "instance_id": self.instance_id,
                "sessions": {"open": len(self.table), "limit": limits.max_sessions, "gone": self.table.expired},
                "counts": asdict(self.table.counts),
                "chats": asdict(self._chats.counts),
                "refused": self.refused,
                "retained_bytes": self.table.retained_bytes,
                "answers_bytes": {"used": received.used, "most": received.most_used, "limit": received.limit},
                "requests_bytes": {"used": requests.used, "most": requests.most_used, "limit": requests.limit},
                "loop_lag": self._lag.summary().as_dict(),
            }
        )


def _host(request: web.BaseRequest) -> str:
    """Return the host that the client used for this server: part of the session's URL."""
    given = request.headers.get("Host", "")
    if not HOST.fullmatch(given):
        raise BadRequest("the request needs a Host header such as 127.0.0.1:8100: it becomes part of the session's URL")
    return given


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=JSON)
