"""Cancel a coroutine at its n-th await. Awaits of an environment, which has a task of its own, count too."""

import asyncio
import functools
from collections.abc import Coroutine, Generator
from typing import Any

from headpond.errors import in_own_task


def cancelled_at(number: int, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """Run the coroutine and cancel its task when it or its environment suspends for the `number`th time."""
    loop = asyncio.get_running_loop()
    awaits = _Awaits(number)

    def new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> "asyncio.Task[Any]":
        if not coroutine.__qualname__.startswith(in_own_task.__qualname__):
            return asyncio.Task(coroutine, loop=loop, **more)
        task = asyncio.Task(_whole(_Counted(coroutine, awaits)), loop=loop, **more)
        task.add_done_callback(lambda _: coroutine.close())  # it has not begun if its task is cancelled at once
        return task

    loop.set_task_factory(new_task)
    awaits.task = asyncio.ensure_future(_whole(_Counted(coroutine, awaits)))
    awaits.task.add_done_callback(lambda _: loop.set_task_factory(None))
    return awaits.task


class _Awaits:
    task: "asyncio.Task[Any]"

    def __init__(self, number: int) -> None:
        self._left = number

    def count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.task.cancel()


async def _whole(awaitable: Any) -> Any:
    return await awaitable


class _Counted:
    def __init__(self, coroutine: Any, awaits: _Awaits) -> None:
        self._awaited = coroutine.__await__()
        self._awaits = awaits

    def __await__(self) -> Generator[Any, Any, Any]:
        step = self._awaited.__next__
        while True:
            try:
                waiting_for = step()
            except StopIteration as end:
                return end.value
            self._awaits.count()
            try:
                yield waiting_for
                step = self._awaited.__next__
            except asyncio.CancelledError as error:
                step = functools.partial(self._awaited.throw, error)
