"""A response that says when it was wholly written to an open connection."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from aiohttp import web


class WatchedResponse(web.Response):
    def __init__(self, request: web.BaseRequest, written: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._watched = request
        self.written = written

    async def write_eof(self, data: bytes = b"") -> None:
        with unbuffered(self._watched) as is_open:
            await super().write_eof(data)
            if is_open():
                self.written()


@contextlib.contextmanager
def unbuffered(request: web.BaseRequest) -> Generator[Callable[[], bool]]:
    """A write ends when the socket has taken every byte: nothing waits in the transport's buffer. Yields whether the
    connection is open."""
    transport = request.transport
    if transport is not None:
        transport.set_write_buffer_limits(high=0)
    yield lambda: transport is not None and not transport.is_closing()
