"""The renderers of one key: each encodes for one caller at a time, and decodes for everybody.

Belongs to one loop. One renderer is enough for most: another is built only when a caller has waited for as long as
building takes, up to a bound.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from penstock.errors import PenstockError
from penstock.offload import cores, in_io_thread
from penstock.renderers.protocol import Renderer

T = TypeVar("T")

logger = logging.getLogger("penstock.renderers")

# Encoding is CPU work: more renderers than cores only take memory (75-95 MB each), and others need the cores, too.
RENDERERS_MOST = 4


class RendererPool:
    def __init__(
        self, first: Renderer, build: Callable[[], Renderer], *, build_s: float, renderers_most: int | None = None
    ) -> None:
        self._first = first
        self._build = build
        self._build_s = build_s
        self._most = renderers_most or min(cores(), RENDERERS_MOST)
        self._idle = [first]
        self._waiting: deque[asyncio.Future[Renderer]] = deque()
        self._growth: asyncio.Task[None] | None = None
        self.renderers = 1

    async def encode(self, fn: Callable[[Renderer], T]) -> T:
        """`fn` in a thread, with a renderer of its own. Cancelled, the caller goes on at once, but the renderer is
        taken until the thread has left it."""
        renderer = await self._take()
        call = asyncio.ensure_future(in_io_thread(fn, renderer))
        call.add_done_callback(lambda done: self._left(renderer, done))
        return await asyncio.shield(call)

    async def decode(self, fn: Callable[[Renderer], T]) -> T:
        """`fn` in a thread, beside whoever encodes."""
        return await in_io_thread(fn, self._first)

    async def _take(self) -> Renderer:
        if self._idle:
            return self._idle.pop()
        loop = asyncio.get_running_loop()
        given = loop.create_future()
        self._waiting.append(given)
        growth = loop.call_later(self._build_s, self._grow)
        try:
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self._give(given.result())
            raise
        finally:
            growth.cancel()

    def _left(self, renderer: Renderer, call: "asyncio.Task[T]") -> None:
        if not call.cancelled():
            call.exception()  # looked at: whoever waited for it may have been cancelled
        self._give(renderer)

    def _give(self, renderer: Renderer) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(renderer)
                return
        self._idle.append(renderer)

    def _grow(self) -> None:
        if self._growth is None and self.renderers < self._most:
            self._growth = asyncio.create_task(self._add())

    async def _add(self) -> None:
        try:
            renderer = await in_io_thread(self._build)
        except PenstockError as error:
            logger.warning("action=renderer_not_added error=%r: the others go on", error)
        else:
            self.renderers += 1
            self._give(renderer)
        finally:
            self._growth = None
