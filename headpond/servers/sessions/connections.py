"""Connections of clients: how many there may be, and errors below the routes.

A connection without a request is idle. Beyond a limit, the one that has been idle longest is closed for a new one, so
that silent clients exclude no others; aiohttp closes idle ones after `sessions.request_s`.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from headpond.servers.sessions.error_responses import error_response

logger = logging.getLogger("headpond.sessions")

HEAD_TOO_LARGE = "the request's head is too large: send fewer or shorter headers, or raise sessions.header_bytes"
UNLIMITED = 1 << 30
# Interval of log lines about closed connections: there may be thousands a second.
LOG_S = 10.0


class JsonErrors(web.RequestHandler):
    """Reports errors below the routes as JSON: malformed HTTP, oversized heads, bugs of this server."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, LineTooLong) or "Too many headers" in str(exc):
            status, message = 431, HEAD_TOO_LARGE
        elif not isinstance(exc, HttpProcessingError):
            logger.error("action=unexpected path=%s", request.path, exc_info=exc)
            message = "internal error of the session server: see action=unexpected in its log"
        if request.writer.output_size:
            raise ConnectionError("the response has begun: the error cannot be sent")
        response = error_response(status, message or "bad request")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Errors of the connection, such as a body that cannot be decoded, are caused by the client: one line."""
        logger.warning("action=connection_dropped error=%r", kw.get("exc_info"))


class JsonServer(web.Server):
    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        *,
        connections: int = UNLIMITED,
        address_connections: int = UNLIMITED,
        **options: Any,
    ) -> None:
        super().__init__(self._counted(handler), **options)
        self._options = options
        self._most, self._most_of_address = connections, address_connections
        self._addresses: dict[web.RequestHandler, str] = {}
        self._by_address = Counter[str]()
        self._idle: OrderedDict[web.RequestHandler, None] = OrderedDict()  # longest first
        self._closed, self._logged_at = 0, -LOG_S

    def __call__(self) -> web.RequestHandler:
        return JsonErrors(self, loop=self._loop, **self._options)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        if self._by_address[address] >= self._most_of_address:
            self._make_room(handler, address, self._most_of_address)
        elif len(self._addresses) >= self._most:
            self._make_room(handler, None, self._most)
        self._addresses[handler] = address
        self._by_address[address] += 1
        self._idle[handler] = None

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._idle.pop(handler, None)
        if (address := self._addresses.pop(handler, None)) is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _counted(
        self, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
        async def counted(request: web.BaseRequest) -> web.StreamResponse:
            connection = request.protocol
            self._idle.pop(connection, None)
            try:
                return await handle(request)
            finally:
                if connection in self._addresses:
                    self._idle[connection] = None

        return counted

    def _make_room(self, new: web.RequestHandler, address: str | None, limit: int) -> None:
        """Close the connection that has been idle longest, of an address if one is given; `new` if none is idle."""
        idle = (each for each in self._idle if address is None or self._addresses[each] == address)
        unwanted = next(idle, new)
        self._idle.pop(unwanted, None)
        unwanted.force_close()
        self._closed += 1
        if time.monotonic() - self._logged_at >= LOG_S:
            self._logged_at = time.monotonic()
            logger.warning(
                "action=connections_closed count=%d open=%d limit=%d address=%s: clients leave connections open; raise "
                "sessions.connections or sessions.address_connections if they are not hostile",
                self._closed,
                len(self._addresses),
                limit,
                address or "any",
            )
