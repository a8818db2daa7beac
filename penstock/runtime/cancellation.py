"""What cancellation must not tear."""

import asyncio
import contextlib
import logging
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


async def run_to_completion(task: asyncio.Task[T]) -> T:
    """Waits until the task is done, and only then lets a cancellation through."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            log.error("action=failed_unseen error=%r: whoever waited for it was cancelled", error)
        raise
