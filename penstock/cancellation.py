"""What cancellation must not tear, and what a library has swallowed of it."""

import asyncio
import contextlib
import logging
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


async def to_the_end(task: asyncio.Task[T]) -> T:
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


def raise_if_cancelled() -> None:
    """For loops that go on after an error: redis-py can answer a cancellation with an error or an empty reply (seen in
    1 of 50 drains with redis-py 8.1), and a task is cancelled only once."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
