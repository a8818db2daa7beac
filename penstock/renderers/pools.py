"""The renderer pools of a process, by key: each is built once, off the loop, however many callers come first.

A build belongs to nobody: a caller that is cancelled does not cancel it, a failure reaches all who wait for it and is
then forgotten. Belongs to one loop.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable

from penstock.offload import in_io_thread
from penstock.renderers.backends import RendererKey, build
from penstock.renderers.pool import RendererPool
from penstock.renderers.protocol import Renderer

logger = logging.getLogger("penstock.renderers")

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
