"""The dashboard's HTTP server: static pages, JSON of runs, and who may read them. It only answers GET.

On a loopback address everyone on this host may read; on any other one a secret is required. All text of a run reaches
the browser as JSON, and the Content-Security-Policy allows this server's own files only.
"""

import hmac
import logging
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from headpond.config.sessions import is_loopback
from headpond.errors import HeadpondError, MalformedId, NotFound, Unauthorised
from headpond.event_loop import factory as event_loop
from headpond.event_loop.offload import in_io_thread
from headpond.ledger.pages import Filter, Key
from headpond.ledger.states import RolloutState
from headpond.servers import listening
from headpond.servers.dashboard.run_view import RunView

logger = logging.getLogger("headpond.dashboard")

STATIC = Path(__file__).parent / "static"
FILE = re.compile(r"(pages/)?[a-z]+\.(html|css|js|svg)")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
COOKIE = "headpond_secret"
# Requests that read files at once: a page asks for two or three.
CONCURRENCY = 4
STOP_S = 1.0  # for requests in progress
NUMBER_MOST = 1 << 53

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(
    runs: list[RunView], *, host: str, port: int, secret: str | None, ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until SIGINT or SIGTERM. Every request needs `secret` if there is one. `ready` is called with the URL."""
    event_loop.run(_serve(runs, host, port, secret, ready), concurrency=CONCURRENCY)


async def _serve(runs: list[RunView], host: str, port: int, given: str | None, ready: Callable[[str], None]) -> None:
    stopping = event_loop.stop_requested()
    secret = given or (None if is_loopback(host) else secrets.token_urlsafe(24))
    shown = "$DASHBOARD_SECRET" if given else secret  # what is printed may be kept in a log
    listener = listening.bind(host, port)
    runner = web.AppRunner(Dashboard(runs, secret).app(), access_log=None, shutdown_timeout=STOP_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        url = listening.url_of(listener)
        for unspecified in ("0.0.0.0", "[::]"):  # noqa: S104 - compared, not bound
            url = url.replace(unspecified, socket.gethostname())
        ready(f"{url}/{f'?secret={shown}' if secret else ''}")
        await stopping.wait()
    finally:
        await runner.cleanup()


class Dashboard:
    def __init__(self, runs: list[RunView], secret: str | None) -> None:
        self._runs = runs
        self._secret = secret

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded])
        run = "/api/runs/{run:[0-9]+}"
        rollout = f"{run}/rollouts/{{id}}"
        read = self._json
        app.add_routes(
            [
                web.get("/", self._index),
                web.get("/static/{path:.+}", self._static),
                web.get("/api/runs", self._list),
                web.get(f"{run}/overview", read(lambda run, request: run.overview())),
                web.get(f"{run}/why", read(lambda run, request: run.why())),
                web.get(f"{run}/curves", read(lambda run, request: run.curves(_listed(request, "keys")))),
                web.get(f"{run}/settings", read(lambda run, request: run.settings())),
                web.get(f"{run}/waterfall", read(lambda run, request: run.waterfall())),
                web.get(f"{run}/rollouts", read(_rollouts)),
                web.get(f"{run}/groups/{{id}}", read(lambda run, request: run.group(request.match_info["id"]))),
                web.get(rollout, read(lambda run, request: run.rollout(request.match_info["id"]))),
                web.get(
                    f"{rollout}/conversation", read(lambda run, request: run.conversation(request.match_info["id"]))
                ),
                web.get(f"{rollout}/part", read(_part)),
                web.get(f"{rollout}/tokens", read(_tokens)),
            ]
        )
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Authorization, errors as `{"error": text}`, and the headers of every response."""
        began = time.perf_counter()
        try:
            self._authorise(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = _error(error.reason, error.status)
            if location := error.headers.get("Location"):
                response.headers["Location"] = location
                response.headers["Set-Cookie"] = error.headers.get("Set-Cookie", "")
        except MalformedId as error:
            response = _error(str(error), 400)
        except HeadpondError as error:
            response = _error(str(error), getattr(error, "status_code", 500))
        response.headers.update(HEADERS)
        response.headers["Server-Timing"] = f"app;dur={1000 * (time.perf_counter() - began):.1f}"
        return response

    def _authorise(self, request: web.Request) -> None:
        """Check the secret. If there is none, the Host must be this host's: a page of another site whose name
        resolves to a loopback address must not read runs."""
        if self._secret is None:
            if not is_loopback(request.url.host or ""):
                raise Unauthorised(f"this dashboard is read at a loopback address, not at {request.url.host}")
            return
        offered = request.query.get("secret") or request.cookies.get(COOKIE) or _bearer(request)
        if not hmac.compare_digest(offered.encode(), self._secret.encode()):
            raise Unauthorised("open the URL with ?secret=... that `headpond dashboard` printed")
        if "secret" in request.query and request.path == "/":
            redirect = web.HTTPFound("/")
            redirect.set_cookie(COOKIE, self._secret, httponly=True, samesite="Strict", path="/")
            redirect.headers["Set-Cookie"] = redirect.cookies[COOKIE].OutputString()
            raise redirect

    async def _index(self, request: web.Request) -> web.Response:
        return await _file("index.html")

    async def _static(self, request: web.Request) -> web.Response:
        return await _file(request.match_info["path"])

    async def _list(self, request: web.Request) -> web.Response:
        return _answer({"runs": await in_io_thread(lambda: [run.summary() for run in self._runs])})

    def _json(self, read: Callable[[RunView, web.Request], dict[str, Any]]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            number = int(request.match_info["run"])
            if number >= len(self._runs):
                raise NotFound(f"there is no run {number}: this dashboard shows {len(self._runs)}")
            return await in_io_thread(lambda: _answer(read(self._runs[number], request)))

        return handle


def _rollouts(run: RunView, request: web.Request) -> dict[str, Any]:
    query = request.query
    state = query.get("state")
    if state and state not in set(RolloutState):
        raise MalformedId(f"{state!r} is not the state of a rollout")
    wanted = Filter(
        state=RolloutState(state) if state else None,
        reason=query.get("reason") or None,
        step=_number(request, "step", -1) if query.get("step") else None,
        environment=query.get("environment") or None,
        lost_before_generation=query.get("generated") == "false",
    )
    before = Key.parse(query["before"]) if query.get("before") else None
    return run.rollouts(wanted, before, _number(request, "limit", 50))


def _tokens(run: RunView, request: web.Request) -> dict[str, Any]:
    return run.tokens(request.match_info["id"], _number(request, "start", 0), _number(request, "count", 1024))


def _part(run: RunView, request: web.Request) -> dict[str, Any]:
    place = (_number(request, "conversation", 0), _number(request, "message", 0))
    return run.message_part(
        request.match_info["id"], *place, request.query.get("name", "content"), _number(request, "start", 0)
    )


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name) or str(default)
    try:
        number = int(text)
    except ValueError:
        raise MalformedId(f"{name}={text[:40]!r} is not a number") from None
    return max(0, min(number, NUMBER_MOST))


def _listed(request: web.Request, name: str) -> list[str]:
    return [part for part in request.query.get(name, "").split(",") if part][:64]


def _bearer(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


async def _file(name: str) -> web.Response:
    path = STATIC / name
    if not FILE.fullmatch(name) or not path.is_file():
        raise NotFound(f"there is no {name[:80]!r}")
    return web.Response(body=await in_io_thread(path.read_bytes), content_type=KINDS[path.suffix], charset="utf-8")


def _answer(content: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json", status=status)


def _error(text: str, status: int) -> web.Response:
    return _answer({"error": text}, status)
