"""Cancel a coroutine at its n-th await."""

import asyncio
import functools
from collections.abc import Coroutine, Generator
from typing import Any


def cancelled_at(number: int, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """Run the coroutine and cancel its task when it suspends for the `number`th time."""
    return asyncio.ensure_future(_whole(_CancelledAt(coroutine, number)))


async def _whole(awaitable: Any) -> Any:
    return await awaitable


class _CancelledAt:
    def __init__(self, coroutine: Any, number: int) -> None:
        self._awaited = coroutine.__await__()
        self._number = number

    def __await__(self) -> Generator[Any, Any, Any]:
        waits, step = 0, self._awaited.__next__
        while True:
            try:
                waiting_for = step()
            except StopIteration as end:
                return end.value
            waits += 1
            if waits == self._number:
                task = asyncio.current_task()
                assert task
                task.cancel()
            try:
                yield waiting_for
                step = self._awaited.__next__
            except asyncio.CancelledError as error:
                step = functools.partial(self._awaited.throw, error)
