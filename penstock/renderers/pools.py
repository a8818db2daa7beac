"""The renderer pools of a process, by key: each is built once, off the loop, however many callers come first.

A build belongs to nobody: a caller that is cancelled does not cancel it, a failure reaches all who wait for it and is
then forgotten. Belongs to one loop.
"""

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from penstock.errors import PenstockError
from penstock.renderers.backends import RendererKey, build
from penstock.renderers.protocol import NextTurn, Renderer, Tools, next_prompt
from penstock.runtime.offload import cores, in_io_thread
from penstock.turn import Ids

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


# A tokenizer takes 75-95 MB. Who evaluates more models at once than this builds some of them again.
POOLS_MOST = 8


class RendererPools:
    def __init__(
        self,
        build: Callable[[RendererKey], Renderer] = build,
        *,
        pools_most: int = POOLS_MOST,
        renderers_most: int | None = None,
    ) -> None:
        self._build = build
        self._pools_most = pools_most
        self._renderers_most = renderers_most
        self._pools: dict[RendererKey, RendererPool] = {}  # the one used last is the last
        self._building: dict[RendererKey, asyncio.Task[RendererPool]] = {}

    @property
    def keys(self) -> list[RendererKey]:
        """Of the pools that are kept; the next to go first."""
        return list(self._pools)

    @property
    def building(self) -> list[RendererKey]:
        return list(self._building)

    async def pool(self, key: RendererKey) -> RendererPool:
        if pool := self._pools.pop(key, None):
            self._pools[key] = pool
            return pool
        building = self._building.get(key)
        if building is None:
            building = self._building[key] = asyncio.create_task(self._first(key))
            building.add_done_callback(functools.partial(self._built, key))
        return await asyncio.shield(building)

    async def warm_up(self, keys: Iterable[RendererKey]) -> None:
        """Build what is known to be needed, before anybody waits for it."""
        await asyncio.gather(*map(self.pool, keys))

    async def _first(self, key: RendererKey) -> RendererPool:
        started = time.monotonic()
        build = functools.partial(self._build, key)
        first, build_s = await in_io_thread(build), time.monotonic() - started
        logger.info("action=renderer_built backend=%s model=%s s=%.3f", key.backend, key.model, build_s)
        return RendererPool(first, build, build_s=build_s, renderers_most=self._renderers_most)

    def _built(self, key: RendererKey, building: asyncio.Task[RendererPool]) -> None:
        """Runs before those who wait go on: whoever comes next finds a pool, or builds again."""
        del self._building[key]
        if building.cancelled():
            return
        if error := building.exception():
            logger.warning("action=renderer_not_built error=%r: the next caller tries again", error)
            return
        self._pools[key] = building.result()
        while len(self._pools) > self._pools_most:
            del self._pools[next(iter(self._pools))]


class PooledRenderer:
    def __init__(self, pools: RendererPools, key: RendererKey) -> None:
        self._pools = pools
        self.key = key

    async def warm_up(self) -> None:
        await self._pools.warm_up([self.key])

    async def prompt_ids(self, turn: NextTurn) -> Ids:
        pool = await self._pools.pool(self.key)
        return await pool.encode(functools.partial(next_prompt, turn=turn))

    async def message(self, completion_ids: Ids, *, prompt_ids: Ids, tools: Tools) -> dict[str, Any]:
        def read(renderer: Renderer) -> dict[str, Any]:
            return renderer.message(completion_ids, prompt_ids=prompt_ids, tools=tools)

        pool = await self._pools.pool(self.key)
        return await pool.decode(read)
