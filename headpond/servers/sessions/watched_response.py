"""A response that reports when it was wholly written to an open connection."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from aiohttp import web


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
