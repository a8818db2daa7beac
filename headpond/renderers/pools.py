"""Renderer pools of one event loop, by key. Each pool is built once, in a thread, and shared by
concurrent callers.

Cancelling a caller does not cancel the build. A failed build raises in every waiting caller and
is not cached.
"""

import asyncio
import functools
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from headpond.errors import HeadpondError
from headpond.event_loop.offload import cores, in_io_thread
from headpond.renderers.bytes_chatml import BytesChatmlRenderer
from headpond.renderers.process_renderer import ProcessRenderer
from headpond.renderers.protocol import NO_VALUES, NextTurn, Renderer, TemplateValues, Tools, next_prompt
from headpond.turn import Ids

if TYPE_CHECKING:
    from headpond.config.engine import RendererSettings


T = TypeVar("T")

logger = logging.getLogger("headpond.renderers")

# Encoding is CPU work: more renderers than cores only take memory (75-95 MB each). Other work needs
# cores, too.
MAX_RENDERERS = 4
# A tokenizer takes 75-95 MB. Evaluating more models than this at once rebuilds some of them.
MAX_POOLS = 8


@dataclass(frozen=True, kw_only=True)
class RendererKey:
    """Equal keys share a renderer. `options` and `template` are JSON with sorted keys."""

    backend: str
    model: str
    """Directory of the tokenizer; unused by bytes-chatml."""
    options: str = "{}"
    template: str = "{}"

    @classmethod
    def of(cls, settings: "RendererSettings", request_model: str, *, evaluation: bool = False) -> "RendererKey":
        """Return the key for a request. Training requests share the renderer of the pinned
        model, whichever adapter they name. Without a pinned model, and in evaluation, each
        request's model has its own renderer."""
        pinned = None if evaluation else settings.model
        return cls(
            backend=settings.backend,
            model=pinned or request_model,
            options=_sorted_json(settings.options),
            template=_sorted_json(settings.chat_template_kwargs),
        )


def build(key: RendererKey) -> Renderer:
    """Build a renderer; blocks while the tokenizer is read. Raise ConfigError for a permanent
    problem, InfrastructureFailure for one that a retry may solve."""
    if key.backend == "bytes-chatml":
        return BytesChatmlRenderer()
    return ProcessRenderer(
        backend=key.backend, model=key.model, options=json.loads(key.options), template=json.loads(key.template)
    )


def _sorted_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


class RendererPool:
    """Renderers of one key. The pool grows if callers wait longer than a build takes."""

    def __init__(
        self, first: Renderer, build: Callable[[], Renderer], *, build_s: float, max_renderers: int | None = None
    ) -> None:
        self._first = first
        self._build = build
        self._build_s = build_s
        self._max_renderers = max_renderers or min(cores(), MAX_RENDERERS)
        self._idle = [first]
        self._waiting: deque[asyncio.Future[Renderer]] = deque()
        self._growth: asyncio.Task[None] | None = None
        self.renderers = 1

    async def encode(self, fn: Callable[[Renderer], T]) -> T:
        """Run `fn` in a thread with exclusive use of a renderer. A cancelled caller returns at
        once, but the renderer stays in use until the thread is done."""
        renderer = await self._acquire()
        call = asyncio.ensure_future(in_io_thread(fn, renderer))
        call.add_done_callback(lambda done: self._call_done(renderer, done))
        return await asyncio.shield(call)

    async def decode(self, fn: Callable[[Renderer], T]) -> T:
        """Run `fn` in a thread, concurrently with encoding."""
        return await in_io_thread(fn, self._first)

    async def _acquire(self) -> Renderer:
        if self._idle:
            return self._idle.pop()
        loop = asyncio.get_running_loop()
        acquired = loop.create_future()
        self._waiting.append(acquired)
        growth = loop.call_later(self._build_s, self._grow)
        try:
            return await acquired
        except asyncio.CancelledError:
            if acquired.done() and not acquired.cancelled():
                self._release(acquired.result())
            raise
        finally:
            growth.cancel()

    def _call_done(self, renderer: Renderer, call: "asyncio.Task[T]") -> None:
        if not call.cancelled():
            call.exception()  # Mark the exception as retrieved: the caller may have been cancelled.
        self._release(renderer)

    def _release(self, renderer: Renderer) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(renderer)
                return
        self._idle.append(renderer)

    def _grow(self) -> None:
        if self._growth is None and self.renderers < self._max_renderers:
            self._growth = asyncio.create_task(self._add())

    async def _add(self) -> None:
        try:
            renderer = await in_io_thread(self._build)
        except HeadpondError as error:
            logger.warning("action=renderer_not_added error=%r: the pool keeps its size", error)
        else:
            self.renderers += 1
            self._release(renderer)
        finally:
            self._growth = None


class RendererPools:
    """The pools of all keys. The least recently used is dropped beyond `max_pools`."""

    def __init__(
        self,
        build: Callable[[RendererKey], Renderer] = build,
        *,
        max_pools: int = MAX_POOLS,
        max_renderers: int | None = None,
    ) -> None:
        self._build = build
        self._max_pools = max_pools
        self._max_renderers = max_renderers
        self._pools: dict[RendererKey, RendererPool] = {}  # least recently used first
        self._building: dict[RendererKey, asyncio.Task[RendererPool]] = {}

    @property
    def keys(self) -> list[RendererKey]:
        """Keys of the cached pools, least recently used first."""
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
            building = self._building[key] = asyncio.create_task(self._build_pool(key))
            building.add_done_callback(functools.partial(self._built, key))
        return await asyncio.shield(building)

    async def _build_pool(self, key: RendererKey) -> RendererPool:
        started = time.monotonic()
        build = functools.partial(self._build, key)
        first, build_s = await in_io_thread(build), time.monotonic() - started
        logger.info("action=renderer_built backend=%s model=%s s=%.3f", key.backend, key.model, build_s)
        return RendererPool(first, build, build_s=build_s, max_renderers=self._max_renderers)

    def _built(self, key: RendererKey, building: asyncio.Task[RendererPool]) -> None:
        """Store the built pool before the waiting callers resume: the next caller finds it, or
        starts a new build."""
        del self._building[key]
        if building.cancelled():
            return
        if error := building.exception():
            logger.warning("action=renderer_not_built error=%r: the next caller tries again", error)
            return
        self._pools[key] = building.result()
        while len(self._pools) > self._max_pools:
            del self._pools[next(iter(self._pools))]


class PooledRenderer:
    """The renderer of one key, used through its pool."""

    def __init__(self, pools: RendererPools, key: RendererKey) -> None:
        self._pools = pools
        self.key = key

    async def warm_up(self) -> None:
        await self._pools.pool(self.key)

    async def prompt_ids(self, turn: NextTurn) -> Ids:
        pool = await self._pools.pool(self.key)
        return await pool.encode(functools.partial(next_prompt, turn=turn))

    async def message(
        self, completion_ids: Ids, *, prompt_ids: Ids, tools: Tools, values: TemplateValues = NO_VALUES
    ) -> dict[str, Any]:
        def parse(renderer: Renderer) -> dict[str, Any]:
            return renderer.message(completion_ids, prompt_ids=prompt_ids, tools=tools, values=values)

        pool = await self._pools.pool(self.key)
        return await pool.decode(parse)

    async def texts(self, ids: Ids) -> list[str]:
        pool = await self._pools.pool(self.key)
        return await pool.decode(lambda renderer: renderer.texts(ids))
