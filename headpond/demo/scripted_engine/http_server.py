"""The HTTP server: reads a request, waits for the drawn latency, then responds, or fails at the configured rates."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import groupby
from typing import Any

from aiohttp import web

from headpond.demo.scripted_engine.completion_requests import CompletionRequest, read_chat, read_generate
from headpond.demo.scripted_engine.completion_responses import (
    CREATED,
    ResponseContent,
    generate_body,
    sglang_chat_body,
    vllm_chat_body,
)
from headpond.demo.scripted_engine.control_endpoints import ControlEndpoints
from headpond.demo.scripted_engine.draws import Draws
from headpond.demo.scripted_engine.expert_table import Part
from headpond.demo.scripted_engine.generation import Generation, ScriptedSampler, draws_of, room_for
from headpond.demo.scripted_engine.model_sampler import ModelSampler
from headpond.demo.scripted_engine.options import EngineSettings, FailureRates
from headpond.demo.scripted_engine.served_weights import Weights
from headpond.demo.tiny_moe import initial_weights
from headpond.engines.dialects.generate import Generate
from headpond.engines.dialects.vllm import Vllm
from headpond.engines.http.transport import NAME_HEADER, RETRY_HEADER, SESSION_HEADER
from headpond.errors import BadRequest
from headpond.event_loop import factory as event_loop
from headpond.event_loop.loop_lag import LoopLag
from headpond.servers import listening

logger = logging.getLogger("headpond.engine")

# The longest prompts are below 1 MB.
MAX_REQUEST_BYTES = 16 * 2**20
# vLLM's server closes idle connections after the same time.
KEEP_ALIVE_S = 5.0
# Time for requests in flight when the engine stops. They may hang on purpose.
STOP_S = 1.0
JSON = "application/json"
ERROR_PAGE = b"<html><body><h1>502 Bad Gateway</h1></body></html>"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Engine:
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        if settings.model:
            self._weights = Weights(initial_weights(settings.seed))
            self._sampler: ModelSampler | ScriptedSampler = ModelSampler(settings, self._weights)
        else:
            self._weights = Weights()
            self._sampler = ScriptedSampler(settings, self._weights)
        self._chat_body = sglang_chat_body if settings.dialect == "sglang" else vllm_chat_body

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[_errors_as_json])
        control = ControlEndpoints(self._weights, self._settings.dialect).routes() if self._settings.dev_mode else []
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post(Vllm.endpoint, self._chat),
                web.post(Generate.endpoint, self._generate),
                *control,
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        name = self._settings.served_model_name
        model = {"id": name, "object": "model", "created": CREATED, "owned_by": "headpond", "root": name}
        model |= {"parent": None, "max_model_len": self._settings.max_model_len}
        adapters = [model | {"id": adapter, "parent": name} for adapter in self._weights.adapters]
        return web.json_response({"object": "list", "data": [model, *adapters]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        chat = read_chat(await request.read(), self._settings.dialect, tools=self._settings.auto_tool_choice)
        return await self._respond(request, chat, self._chat_body)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, read_generate(await request.read()), generate_body)

    async def _respond(
        self, request: web.Request, completion: CompletionRequest, body: Callable[[ResponseContent], list[Part]]
    ) -> web.StreamResponse:
        if (name := _header(request, NAME_HEADER)) and self._settings.dialect != "sglang":
            completion = replace(completion, request_id=name.decode(errors="replace"))
        session, retry = _header(request, SESSION_HEADER), _header(request, RETRY_HEADER) or b"0"
        draws = draws_of(completion, self._settings, session)
        room_for(completion, self._settings)
        # The retry count and the prompt's length are part of the draw, so a retry or a continuation may succeed.
        chance = Draws(b"%d" % draws.seed, session, retry, b"%d" % len(completion.prompt_ids))
        failure = failure_of(chance, self._settings.failures)
        if failure == "hang":
            await asyncio.Event().wait()  # until the client disconnects
        flight = await self._weights.begin(completion.request_id or f"{draws.seed:016x}", completion.model)
        try:
            alter = partial(altered, failure=failure, chance=chance)
            sampled = await self._sampler.sample(completion, draws, flight, alter)
        finally:
            self._weights.end(flight)
        if failure == "no_experts":
            sampled = replace(sampled, experts=None)
        if failure == "error":
            return _error(500, "failure injected by --failures")
        parts = body(
            ResponseContent(
                request=completion,
                sampled=sampled,
                model=completion.model or self._settings.served_model_name,
            )
        )
        if failure == "malformed":
            return web.Response(body=malformed(parts, draws), content_type=JSON)
        if failure == "disconnect":
            return await _send(request, parts, whole=False)
        return await _send(request, parts)


def altered(generation: Generation, failure: str | None, chance: Draws) -> Generation:
    match failure:
        case "abort":
            return generation.stopped_at(chance.integer("aborted", 0, max(0, len(generation.completion_ids) - 1)))
        case "thought":
            return generation.thinking()
        case "sentinel":
            return generation.without_last_logprob()
        case _:
            return generation


def failure_of(draws: Draws, rates: FailureRates) -> str | None:
    """The name of the field of `rates` that is drawn."""
    share = draws.uniform("failure")
    for rate in fields(rates):
        share -= getattr(rates, rate.name)
        if share < 0:
            return rate.name
    return None


def malformed(parts: Sequence[bytes | memoryview], draws: Draws) -> bytes:
    """A body cut short, a proxy's error page, or valid JSON whose counts do not match."""
    body = b"".join(parts)
    match draws.integer("malformed", 1, 3):
        case 1:
            return body[: len(body) // 2]
        case 2:
            return ERROR_PAGE
        case _:
            one_more = body.replace(b'"token_ids":[', b'"token_ids":[0,', 1)
            return one_more.replace(b'"completion_tokens":', b'"completion_tokens":1')


def _header(request: web.Request, name: str) -> bytes:
    return request.headers.get(name, "").encode("utf-8", "surrogateescape")


async def _send(request: web.Request, parts: Sequence[Part], *, whole: bool = True) -> web.StreamResponse:
    """Parts are sent with one system call, and views of the table's text are not copied."""
    response = web.StreamResponse(headers={"Content-Type": JSON, "Content-Length": str(sum(map(len, parts)))})
    first, *others = _joined(parts)
    with contextlib.suppress(ConnectionResetError):  # the client has disconnected
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
    """The same bytes with neighbouring small parts joined: each part has a cost of its own."""
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
    """Serve until SIGINT or SIGTERM."""
    event_loop.run(_serve(settings))


async def _serve(settings: EngineSettings) -> None:
    stopping = event_loop.stop_requested()
    listener = listening.bind(settings.host, settings.port)
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
        await web.SockSite(runner, listener).start()
        logger.info(
            "action=engine_ready url=%s dialect=%s %s", listening.url_of(listener), settings.dialect,
            f"model={settings.model}" if settings.model else f"experts={settings.routed_experts}",
        )  # fmt: skip
        await stopping.wait()
    finally:
        lag.cancel()
        await runner.cleanup()
