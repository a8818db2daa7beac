"""The HTTP server: reads a request, takes as long as an engine would, answers or fails as it was told to."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Any

import msgspec
from aiohttp import web

from penstock.engines.dialects import Endpoint
from penstock.errors import BadRequest, ConfigError
from penstock.runtime.event_loop import event_loop_factory
from penstock.runtime.loop_lag import LoopLag
from services.engine import bodies
from services.engine.bodies import Printed
from services.engine.completions import answer_to, draws_of
from services.engine.draws import Draws
from services.engine.failures import Failure, failure_of, malformed
from services.engine.requests import Asked, read_chat, read_generate
from services.engine.route_table import Part, RouteTable
from services.engine.settings import Dialect, EngineSettings

logger = logging.getLogger("penstock.engine")

MODEL = "scripted"
"""Its name; a request may use any other, as if it named an adapter."""
SESSION_HEADER = "X-Session-ID"
RETRY_HEADER = "X-Retry-Count"
"""How often the same request was sent before: another try may meet another failure."""
MAX_REQUEST_BYTES = 16 * 2**20
"""The longest prompts are below 1 MB: whatever is much larger is a mistake."""
KEEP_ALIVE_S = 5.0
"""As vLLM's server: a client must expect that an idle connection is closed."""
STOP_S = 1.0
"""For what is under way when the engine is stopped; what hangs would keep it for ever."""
JSON = "application/json"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NewVersion(msgspec.Struct):
    weight_version: int | None = None
    """None: the next one"""


NEW_VERSION = msgspec.json.Decoder(NewVersion)


class Engine:
    def __init__(self, settings: EngineSettings) -> None:
        self.version = 0
        self._settings = settings
        self._routes = RouteTable(settings.routes) if settings.routes.layers else None
        self._print_chat = bodies.sglang_chat if settings.dialect is Dialect.SGLANG else bodies.vllm_chat

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[_errors_as_json])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/weight_version", self._weight_version)
        app.router.add_post("/update_weights", self._update_weights)
        app.router.add_post(Endpoint.CHAT, self._chat)
        app.router.add_post(Endpoint.GENERATE, self._generate)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": bodies.CREATED, "owned_by": "penstock", "root": MODEL}
        model |= {"parent": None, "max_model_len": self._settings.max_model_len}
        return web.json_response({"object": "list", "data": [model]})

    async def _weight_version(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _update_weights(self, request: web.Request) -> web.Response:
        """There are no weights: only the number that answers carry changes."""
        try:
            asked = NEW_VERSION.decode(await request.read() or b"{}")
        except msgspec.DecodeError as error:
            raise BadRequest(f'send {{"weight_version": N}}, or nothing for the next one: {error}') from None
        self.version = self.version + 1 if asked.weight_version is None else asked.weight_version
        logger.info("action=new_version weight_version=%d", self.version)
        return web.json_response({"success": True, "weight_version": self.version})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = read_chat(await request.read(), self._settings.dialect)
        return await self._answer(request, asked, self._print_chat)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_generate(await request.read()), bodies.generate)

    async def _answer(
        self, request: web.Request, asked: Asked, printed: Callable[[Printed], list[Part]]
    ) -> web.StreamResponse:
        session, retry = _header(request, SESSION_HEADER), _header(request, RETRY_HEADER) or b"0"
        draws = draws_of(asked, self._settings, session)
        answer = answer_to(asked, draws, self._settings)
        failure = failure_of(Draws(b"%d" % draws.seed, session, retry), self._settings.failures)
        if failure is Failure.HANG:
            await asyncio.Event().wait()  # until the client leaves
        await asyncio.sleep(answer.latency_s)
        if failure is Failure.ERROR:
            return _error(500, "this failure was asked for by --failures")
        model = asked.model or MODEL
        parts = printed(Printed(asked=asked, answer=answer, model=model, version=self.version, routes=self._routes))
        if failure is Failure.MALFORMED:
            return web.Response(body=malformed(parts, draws), content_type=JSON)
        if failure is Failure.DISCONNECT:
            return await _send(request, parts, whole=False)
        return await _send(request, parts)


def _header(request: web.Request, name: str) -> bytes:
    return request.headers.get(name, "").encode("utf-8", "surrogateescape")


async def _send(request: web.Request, parts: Sequence[Part], *, whole: bool = True) -> web.StreamResponse:
    """The parts go out together, in one call to the system, and a view of the table's text is never copied."""
    response = web.StreamResponse(headers={"Content-Type": JSON, "Content-Length": str(sum(map(len, parts)))})
    first, *others = _joined(parts)
    with contextlib.suppress(ConnectionResetError):  # a client that has left needs no answer
        await response.prepare(request)
        await response.write(first if whole else first[: len(first) // 2])
        if request.transport is None:
            return response
        if whole:
            request.transport.writelines(others)
            await response.write_eof()
        else:
            request.transport.close()
    return response


def _joined(parts: Sequence[Part]) -> list[Part]:
    """The same with neighbours of a few bytes put together: a part costs a call."""
    joined: list[Part] = []
    for kind, neighbours in groupby(filter(len, parts), type):
        if kind is bytes:
            joined.append(b"".join(neighbours))
        else:
            joined.extend(neighbours)
    return joined


def _error(status: int, message: str) -> web.Response:
    kinds = {400: "BadRequestError", 404: "NotFoundError", 413: "RequestTooLargeError", 500: "InternalServerError"}
    error: dict[str, Any] = {"message": message, "type": kinds.get(status, "Error"), "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(400, str(error))
    except web.HTTPError as error:
        return _error(error.status, error.text or error.reason)


def serve(settings: EngineSettings) -> None:
    """Until SIGINT or SIGTERM."""
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_serve(settings))


async def _serve(settings: EngineSettings) -> None:
    stopping = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    runner = web.AppRunner(
        Engine(settings).app(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=STOP_S,
    )
    await runner.setup()
    lag = asyncio.create_task(LoopLag(process="engine").run())
    try:
        await _listen(runner, settings)
        await stopping.wait()
    finally:
        lag.cancel()
        await runner.cleanup()


async def _listen(runner: web.AppRunner, settings: EngineSettings) -> None:
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another --port (0: any)") from error
    host, port = runner.addresses[0][:2]
    logger.info(
        "action=engine_ready url=http://%s:%d dialect=%s routes=%s", host, port, settings.dialect, settings.routes
    )
