"""Shield tasks and resources from their caller's cancellation."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def run_to_completion(task: asyncio.Task[T]) -> T:
    """Wait until the task is done, even if the caller is cancelled. The cancellation is raised
    afterwards."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            logger.error("action=failed_unseen error=%r: its caller was cancelled", error)
        raise


@contextlib.asynccontextmanager
async def opening(start: Coroutine[Any, Any, T], close: Callable[[T], Awaitable[None]]) -> AsyncIterator[T]:
    """Yield what `start` returns, and close it at the end, even if the caller is cancelled while it starts."""
    starting = asyncio.create_task(start)

    async def end() -> None:
        await asyncio.wait([starting])
        if not starting.cancelled() and not starting.exception():
            await close(starting.result())

    try:
        yield await asyncio.shield(starting)
    finally:
        await run_to_completion(asyncio.create_task(end()))
