"""The end of a run as its files see it: the last write of a duty is cancelled while its thread is slow."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class HeldFirst:
    """A function whose first call waits until `release` is called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._began, self._go = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self._began.is_set():
            self._began.set()
            self._go.wait()
        return self._function(*args, **options)

    async def end_with(self, duty: Coroutine[Any, Any, None], last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel `duty` in its first call, wait for it as a TaskGroup does, then await `last`."""
        cancelled = asyncio.create_task(duty)
        await asyncio.to_thread(self._began.wait)
        cancelled.cancel()
        threading.Timer(0.2, self._go.set).start()
        await asyncio.wait([cancelled])
        await last()
        await asyncio.get_running_loop().shutdown_default_executor()  # also what was left behind
