"""Shield a task from its caller's cancellation."""

import asyncio
import contextlib
import logging
from typing import TypeVar

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
