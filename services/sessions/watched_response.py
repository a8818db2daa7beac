"""A response that says when it was wholly written to an open connection."""

from collections.abc import Callable
from typing import Any

from aiohttp import web


class WatchedResponse(web.Response):
    def __init__(self, request: web.BaseRequest, written: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._watched = request
        self._written = written

    async def write_eof(self, data: bytes = b"") -> None:
        """The write ends when the socket has taken every byte: nothing may wait in the transport's buffer."""
        transport = self._watched.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=0)
        await super().write_eof(data)
        if transport is not None and not transport.is_closing():
            self._written()
