"""The HTTP surface: which path is answered by what, who may ask, and every error as `{"error": text}`."""

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict

import orjson
from aiohttp import web

from penstock.config import RunConfig
from penstock.engines.transport import ByteBudget
from penstock.errors import BlobMissing, NotFound, PenstockError, SessionError, Unauthorised
from penstock.runtime.loop_lag import LoopLag
from penstock.runtime.offload import in_io_thread
from penstock.turn import ids_text
from services.sessions import headers
from services.sessions.backend import Asked, Backend
from services.sessions.chats import Chats, passed_on
from services.sessions.connection import JSON, error_response
from services.sessions.requests import read_body, read_new_session, read_seal
from services.sessions.session_table import Entry, Notes, Registry, opened

logger = logging.getLogger("penstock.sessions")

MODELS, CHAT = "/v1/models", "/v1/chat/completions"

Handler = Callable[[web.BaseRequest, Entry, Notes], Awaitable[web.Response]]


class SessionServer:
    def __init__(self, config: RunConfig, registry: Registry, backend: Backend, lag: LoopLag) -> None:
        self.registry = registry
        self._config = config
        self._settings = config.sessions
        self._backend = backend
        self._lag = lag
        self._requests = ByteBudget(self._settings.requests_bytes)
        self._chats = Chats(config, backend, self._requests)
        self.instance_id = self._settings.instance_id or secrets.token_hex(16)
        self._health = orjson.dumps({"status": "ok", "session_server_instance_id": self.instance_id})
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", ""): self._show,
            ("DELETE", ""): self._delete,
            ("POST", "/seal"): self._seal,
            ("POST", CHAT): self._chat,
            ("GET", MODELS): self._proxy,
        }
        for path in self._settings.proxy_allow:
            for method in ("GET", "POST"):
                self._routes.setdefault((method, path), self._proxy)

    async def warm_up(self) -> None:
        await self._chats.warm_up()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(request)
        except SessionError as error:
            return error_response(error.status_code, str(error))
        except BlobMissing:  # closed while its files were read
            return error_response(NotFound.status_code, f"session not found: {request.path}")
        except PenstockError as error:
            logger.error("action=chat_failed path=%s error=%s", request.path, error)
            return error_response(500, str(error))
        except ConnectionError:  # the client has left before its request was read: nobody will see this
            return error_response(400, "the request broke off")

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
                handler = self._routes.get((method, "/" + rest[0] if rest else ""))
                entry = await self.registry.find(id)
                notes = self._authorised(request, entry)
                if handler is None:
                    raise NotFound(f"there is no {method} {path}")
                return await handler(request, entry, notes)
            case method, _:
                raise NotFound(f"there is no {method} {path}")

    def _authorised(self, request: web.BaseRequest, entry: Entry) -> Notes:
        assert entry.notes is not None
        if self._settings.needs_secret and not headers.has_secret(request.headers, entry.notes.secret_digest):
            raise Unauthorised("the session's secret is required: send it as bearer token (api_key)")
        return entry.notes

    async def _create(self, request: web.BaseRequest) -> web.Response:
        asked = read_new_session(await self._body(request))
        entry, secret = await self.registry.create(asked)
        if asked.policy_version is not None:
            self._backend.replicas.announce(asked.policy_version)
        base_url = f"{request.scheme}://{request.host}/sessions/{entry.id}/v1"
        return _json(orjson.dumps({"session_id": entry.id, "base_url": base_url, "secret": secret}))

    async def _chat(self, request: web.BaseRequest, entry: Entry, notes: Notes) -> web.Response:
        try:
            return await self._chats.answer(request, entry, notes)
        finally:
            self.registry.touch(entry)

    async def _show(self, _: web.BaseRequest, entry: Entry, __: Notes) -> web.Response:
        session = opened(entry)
        settings = session.settings
        ids = session.token_ids()
        records = await session.records()
        metadata = {
            "accumulated_token_ids": orjson.Fragment(b"[%b]" % ids_text(ids)),
            "rollout": settings.rollout,
            "attempt": settings.attempt,
            "mode": settings.mode,
            "turns": session.turns,
        }
        return _json(await in_io_thread(_shown, entry.id, records, metadata))

    async def _delete(self, _: web.BaseRequest, entry: Entry, __: Notes) -> web.Response:
        await self.registry.delete(entry)
        return web.Response(status=204)

    async def _seal(self, request: web.BaseRequest, entry: Entry, _: Notes) -> web.Response:
        asked = read_seal(await self._body(request))
        return _json(await self.registry.seal(entry, asked.error))

    async def _proxy(self, request: web.BaseRequest, entry: Entry, notes: Notes) -> web.Response:
        body = await self._body(request)
        own_key = self._backend.settings.api_key is not None
        passed = headers.to_upstream(request.headers, notes.secret_digest, own_key=own_key)
        target = request.rel_url.raw_path_qs.removeprefix(f"/sessions/{entry.id}")
        asked = Asked(method=request.method, target=target, body=body, headers=passed)
        async with self._backend.ask(asked, home=entry.home) as answered:
            return passed_on(answered)

    async def _body(self, request: web.BaseRequest) -> bytes:
        limits = self._settings
        with self._requests.reservation() as reservation:
            return await read_body(request, reservation, limit=limits.request_bytes, timeout_s=limits.request_s)

    def _status(self) -> bytes:
        received, requests, limits = self._backend.budget, self._requests, self._settings
        return orjson.dumps(
            {
                "instance_id": self.instance_id,
                "sessions": {"open": len(self.registry), "limit": limits.max_sessions, "gone": self.registry.expired},
                "counts": asdict(self.registry.counts),
                "chats": asdict(self._chats.counts),
                "retained_bytes": self.registry.retained_bytes,
                "answers_bytes": {"used": received.used, "most": received.most_used, "limit": received.limit},
                "requests_bytes": {"used": requests.used, "most": requests.most_used, "limit": requests.limit},
                "loop_lag": self._lag.summary().as_dict(),
            }
        )


def _shown(id: str, records: list[bytes], metadata: Mapping[str, object]) -> bytes:
    shown = {"session_id": id, "records": [orjson.Fragment(record) for record in records], "metadata": metadata}
    return orjson.dumps(shown)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=JSON)
