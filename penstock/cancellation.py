"""Cancellation that a library has swallowed is raised again."""

import asyncio


def raise_if_cancelled() -> None:
    """For loops that go on after an error: redis-py can answer a cancellation with an error or an empty reply (seen in
    1 of 50 drains with redis-py 8.1), and a task is cancelled only once."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
