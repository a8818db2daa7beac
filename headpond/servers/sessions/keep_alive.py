"""Event streams of chats that take long. The answer is sent whole, when it is recorded; until then a stream begins with
keep-alives, so that no client and no proxy gives up. What fails after that is an event of the stream."""

import asyncio
import contextlib
from collections.abc import Callable, Generator
from typing import Any

import orjson
from aiohttp import web

from headpond.servers.sessions.apis import Api
from headpond.servers.sessions.error_responses import engine_error

EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class WatchedResponse(web.Response):
    def __init__(self, request: web.BaseRequest, written: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._watched, self._written = request, written

    async def write_eof(self, data: bytes = b"") -> None:
        with self.watched_write():
            await super().write_eof(data)

    @contextlib.contextmanager
    def watched_write(self) -> Generator[None]:
        """The body writes the whole answer. Its writes end when the socket has taken every byte: nothing may wait in
        the transport's buffer."""
        transport = self._watched.transport
        if transport is not None and not transport.is_closing():
            transport.set_write_buffer_limits(high=0)
        yield
        if transport is not None and not transport.is_closing():
            self._written()


class KeepAlives:
    def __init__(self, request: web.BaseRequest, api: Api, interval_s: float) -> None:
        self._request = request
        self._api = api
        self._interval_s = interval_s
        self._answered = asyncio.Event()
        self._stream: web.StreamResponse | None = None
        self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client left
            while not await self._answered_within():
                if self._stream is None:
                    self._stream = web.StreamResponse(headers=EVENT_STREAM)
                    await self._stream.prepare(self._request)
                await self._stream.write(self._api.keep_alive)

    async def _answered_within(self) -> bool:
        try:
            async with asyncio.timeout(self._interval_s):
                return await self._answered.wait()
        except TimeoutError:
            return False

    async def end(self, response: web.StreamResponse) -> web.StreamResponse:
        """The response, or the stream that had begun with the response at its end."""
        self._answered.set()
        await self._sending
        if self._stream is None or not isinstance(response, web.Response):
            return response
        watched = response.watched_write() if isinstance(response, WatchedResponse) else contextlib.nullcontext()
        with contextlib.suppress(ConnectionError), watched:
            await self._stream.write(self._events(response))
            await self._stream.write_eof()
        return self._stream

    def cancel(self) -> None:
        self._sending.cancel()

    def _events(self, response: web.Response) -> bytes:
        body = response.body if isinstance(response.body, bytes) else b""
        if response.status == 200:
            return body
        try:
            error = orjson.loads(body)
        except orjson.JSONDecodeError:
            error = None
        match error:
            case {"error": {"message": str()}}:
                return self._api.error_events(error)
            case _:
                return self._api.error_events(self._api.error(response.status, engine_error(body), ""))


# Set on a request whose answer is a stream.
KEEP_ALIVES = web.RequestKey("keep_alives", KeepAlives)
