"""An inference server for tests, on a real socket and its own event loop. A response is a function of its request.

Requests carry how often they were sent before (`X-Retry-Count`), so even a transient fault is such a function.
"""

import asyncio
import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web
from multidict import CIMultiDict

from headpond.engines.http.transport import NAME_HEADER
from headpond.engines.replicas.load import METRICS_PATH
from headpond.renderers import NextTurn
from headpond.turn import Ids, Message
from support.conversations import ROLES, rows_of
from support.engine_responses import ResponseSpec, compact
from support.waiting import HANG_S


@dataclass(frozen=True, kw_only=True)
class ReceivedRequest:
    """A request as the server received it."""

    method: str
    path: str
    body: Any
    headers: Mapping[str, str]
    query: str = ""

    @property
    def messages(self) -> list[Message]:
        return self.body["messages"]

    @property
    def retry(self) -> int:
        return int(self.headers["X-Retry-Count"])


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response, or how it fails."""

    body: bytes = b""
    status: int = 200
    chunked: bool = False
    breaks_off_at: int | None = None
    """the connection ends after that many bytes of the body; before its headers when negative"""
    hangs: bool = False
    waits_for: threading.Event | None = None
    """nothing is sent before it is set"""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


NAMED = {"vllm": ("id", "chatcmpl-"), "sglang": ("id", ""), "generate": ("request_id", "generate-tokens-")}
"""Where a response has the name of its request, and what stands before it."""
VERSION_PATHS = frozenset({"/weight_info", "/model_info", "/get_model_info", "/get_weight_version"})
Respond = Callable[[ReceivedRequest], Response]


@dataclass(kw_only=True)
class Server:
    """Started by `serving`. Can be stopped and started again on the same port."""

    respond: Respond
    port: int = 0
    weights: str | None = None
    """what it calls its weights when it is asked; None: it does not say. Such requests are not in `received`."""
    metrics: str | Callable[[], str] = ""
    """its page /metrics; empty: it has none. Requests for it are not in `received`."""
    received: list[ReceivedRequest] = field(default_factory=list[ReceivedRequest])
    answering: int = 0
    most_answering: int = 0
    unread_bytes: int = 0
    """bytes written to the socket, of bodies that are not yet complete"""
    _loop: asyncio.AbstractEventLoop | None = None
    _stop: asyncio.Event | None = None
    _thread: threading.Thread | None = None
    _transports: weakref.WeakSet[asyncio.Transport] = field(default_factory=weakref.WeakSet[asyncio.Transport])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(HANG_S)

    def stop(self) -> None:
        """Breaks off responses in flight."""
        if self._thread and self._loop and self._stop:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
            self._thread = None

    async def _serve(self, ready: threading.Event) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await runner.setup()
        connections = runner.server
        assert connections is not None
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        listener = await self._loop.create_server(connections, "127.0.0.1", self.port, reuse_address=True)
        self.port = listener.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        # 3.13.0 cannot delete a connection that becomes known after its server was closed. So accept no more, then wait
        # a few iterations of the loop until the one that was accepted last is known.
        for sock in listener.sockets:
            self._loop.remove_reader(sock.fileno())
        for _ in range(5):
            await asyncio.sleep(0)
        listener.close()
        await runner.cleanup()
        await connections.shutdown(0)
        for transport in list(self._transports):  # one whose client does not read would stay open
            with contextlib.suppress(AttributeError):  # it has lost its connection: asyncio's abort has no loop then
                transport.abort()
        await asyncio.sleep(0)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self._transports.add(request.transport)
        if request.path in VERSION_PATHS:
            return web.json_response({"weight_version": self.weights}, status=200 if self.weights else 404)
        if request.path == METRICS_PATH:
            metrics = self.metrics if isinstance(self.metrics, str) else self.metrics()
            return web.Response(text=metrics, status=200 if metrics else 404)
        headers = CIMultiDict(request.headers, peer=str(request.transport.get_extra_info("peername")))
        body = json.loads(await request.read() or b"null")
        received = ReceivedRequest(
            method=request.method, path=request.path, body=body, headers=headers, query=request.query_string
        )
        self.received.append(received)
        self.answering += 1
        self.most_answering = max(self.most_answering, self.answering)
        try:
            return await self._respond(request, self.respond(received))
        finally:
            self.answering -= 1

    async def _respond(self, request: web.Request, response: Response) -> web.StreamResponse:
        assert request.transport is not None
        if response.hangs:
            await asyncio.Event().wait()
        while response.waits_for and not response.waits_for.is_set():
            await asyncio.sleep(0.005)
        if response.breaks_off_at is not None and response.breaks_off_at < 0:
            request.transport.abort()
        stream = web.StreamResponse(status=response.status, headers=response.headers)
        if response.chunked:
            stream.enable_chunked_encoding()
        else:
            stream.content_length = len(response.body)
        await stream.prepare(request)
        await self._send(stream, response.body[: response.breaks_off_at])
        if response.breaks_off_at is not None:
            request.transport.abort()
        await stream.write_eof()
        return stream

    async def _send(self, response: web.StreamResponse, body: bytes) -> None:
        sent = 0
        try:
            for start in range(0, len(body), 1 << 16):
                piece = memoryview(body)[start : start + (1 << 16)]
                await response.write(piece)
                self.unread_bytes += len(piece)
                sent += len(piece)
        finally:
            self.unread_bytes -= sent


@contextlib.contextmanager
def serving(respond: Respond) -> Generator[Server]:
    server = Server(respond=respond)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def prompt_ids(messages: Sequence[Message]) -> list[int]:
    """Each message as its role and its bytes; the ids of a longer conversation begin with those of its prefix."""
    return [token for message in messages for token in (ROLES[message["role"]], *content_ids(message))] + [3]


def content_ids(message: Message) -> list[int]:
    calls, thoughts = message.get("tool_calls"), message.get("reasoning") or message.get("reasoning_content") or ""
    return list((thoughts + (message.get("content") or "") + (json.dumps(calls) if calls else "")).encode())


class Bytes:
    """A renderer with the tokens of the test server."""

    async def prompt_ids(self, turn: NextTurn) -> Ids:
        history = [turn.prompt_ids, turn.completion_ids]
        new = turn.messages[-turn.appended :] if len(turn.prompt_ids) else turn.messages
        return np.concatenate([*history, np.array(prompt_ids(new), np.int32)])

    async def message(self, completion_ids: Ids, **_: Any) -> Message:
        return {"content": bytes(completion_ids.tolist()).decode()}


def answer(
    request: ReceivedRequest, message: str | Message, *, dialect: str = "vllm", routed: bool = False, **changes: Any
) -> bytes:
    """The body of a response whose completion is `message`."""
    message = {"role": "assistant", "content": message} if isinstance(message, str) else message
    ids = next((request.body[name] for name in ("token_ids", "input_ids") if name in request.body), None)
    ids = prompt_ids(request.messages) if ids is None else ids
    completion = content_ids(message)
    start = {
        "vllm": 0,
        "sglang": request.body.get("routed_experts_start_len", 0),
        "generate": request.body.get("sampling_params", {}).get("routed_experts_prompt_start", 0),
    }[dialect]
    rows = rows_of([*ids, *completion])[start:] if routed else None
    form = {"dialect": dialect, "form": "bare" if dialect == "sglang" else "object", "start": start}
    logprobs = [-token / 64 for token in completion]
    response = ResponseSpec(prompt=ids, completion=completion, logprobs=logprobs, rows=rows, **form).as_dict()
    if dialect != "generate":
        response["choices"][0]["message"] = message
    if dialect == "sglang":
        response["choices"][0]["prompt_token_ids"] = ids
    if name := request.body.get("rid") if dialect == "sglang" else request.headers.get(NAME_HEADER):
        key, prefix = NAMED[dialect]
        response[key] = prefix + name
    return compact({**response, **changes})


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def tool_call(name: str, arguments: Any, *, id: str = "c1") -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def calling(*calls: Message) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}
