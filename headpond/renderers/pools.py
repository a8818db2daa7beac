"""The renderer of a process: a pool that is built once, in a thread, and shared by concurrent callers.

Cancelling a caller does not cancel the build. A failed build raises in every waiting caller and
is not kept.
"""

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable
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


def build(settings: "RendererSettings", model: str) -> Renderer:
    """Build the renderer of `settings.model`, or of the engine's `model`; blocks while the tokenizer is read.
    Raise ConfigError for a permanent problem, InfrastructureFailure for one that a retry may solve."""
    if settings.backend == "bytes-chatml":
        return BytesChatmlRenderer()
    return ProcessRenderer(
        backend=settings.backend,
        model=settings.model or model,
        options=settings.options,
        template=settings.chat_template_kwargs,
    )


class RendererPool:
    """Renderers of one tokenizer. The pool grows if callers wait longer than a build takes."""

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


class PooledRenderer:
    """A renderer, used through its pool."""

    def __init__(self, build: Callable[[], Renderer], *, name: str = "", max_renderers: int | None = None) -> None:
        """`name` is for the log."""
        self._build = build
        self._name = name
        self._max_renderers = max_renderers
        self._building: asyncio.Task[RendererPool] | None = None

    @classmethod
    def of(cls, settings: "RendererSettings", model: str) -> "PooledRenderer":
        """The renderer of `policy.renderer`, for an engine that serves `model`."""
        name = f"backend={settings.backend} model={settings.model or model}"
        return cls(functools.partial(build, settings, model), name=name)

    async def pool(self) -> RendererPool:
        """Return the pool. The first caller builds it."""
        if self._building is None:
            self._building = asyncio.create_task(self._build_pool())
            self._building.add_done_callback(self._forget_failure)
        return await asyncio.shield(self._building)

    async def _build_pool(self) -> RendererPool:
        started = time.monotonic()
        first, build_s = await in_io_thread(self._build), time.monotonic() - started
        logger.info("action=renderer_built %s s=%.3f", self._name, build_s)
        return RendererPool(first, self._build, build_s=build_s, max_renderers=self._max_renderers)

    def _forget_failure(self, building: "asyncio.Task[RendererPool]") -> None:
        if building.cancelled():
            self._building = None
        elif error := building.exception():
            logger.warning("action=renderer_not_built error=%r: the next caller tries again", error)
            self._building = None

    async def prompt_ids(self, turn: NextTurn) -> Ids:
        pool = await self.pool()
        return await pool.encode(functools.partial(next_prompt, turn=turn))

    async def message(
        self, completion_ids: Ids, *, prompt_ids: Ids, tools: Tools, values: TemplateValues = NO_VALUES
    ) -> dict[str, Any]:
        pool = await self.pool()
        return await pool.decode(
            lambda renderer: renderer.message(completion_ids, prompt_ids=prompt_ids, tools=tools, values=values)
        )

    async def texts(self, ids: Ids) -> list[str]:
        pool = await self.pool()
        return await pool.decode(lambda renderer: renderer.texts(ids))
