"""A response that says when it is written, and whether it was wholly written to an open connection."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from aiohttp import web


class WatchedResponse(web.Response):
    def __init__(
        self, request: web.BaseRequest, begins: Callable[[], None], ends: Callable[[bool], None], **options: Any
    ) -> None:
        """`begins` is called before the body is written, if its client is there; `ends` with whether it was written."""
        super().__init__(**options)
        self._watched = request
        self._begins, self._ends = begins, ends

    async def write_eof(self, data: bytes = b"") -> None:
        with self.watched_write():
            await super().write_eof(data)

    @contextlib.contextmanager
    def watched_write(self) -> Generator[None]:
        """The body writes the whole answer. Its writes end when the socket has taken every byte: nothing may wait in
        the transport's buffer."""
        transport, written = self._watched.transport, False
        if transport is not None and not transport.is_closing():
            transport.set_write_buffer_limits(high=0)
            self._begins()
        try:
            yield
            written = transport is not None and not transport.is_closing()
        finally:
            self._ends(written)
