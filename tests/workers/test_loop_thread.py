import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import uvloop
from support.waiting import HANG_S

from headpond.errors import ConfigError
from headpond.workers.loop_thread import LoopThread

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@asynccontextmanager
async def nothing() -> AsyncGenerator[None]:
    yield


def started(
    lifespan: Callable[[], AbstractAsyncContextManager[None]] = nothing,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> LoopThread:
    thread = LoopThread(new_loop(), lifespan)
    thread.start()
    return thread


@pytest.mark.parametrize("new_loop", LOOPS)
def test_the_lifespan_surrounds_everything_on_the_loop(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    order: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as group:
            background = group.create_task(asyncio.Event().wait())
            order.append("entered")
            yield
            order.append("left")
            background.cancel()

    thread = started(lifespan, new_loop)
    assert thread.wait_entered(HANG_S)
    thread.loop.call_soon_threadsafe(order.append, "work")
    thread.stop(HANG_S)
    assert order == ["entered", "work", "left"]
    assert thread.loop.is_closed()


def test_the_error_that_prevents_a_lifespan_is_raised() -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        raise ConfigError("no store")
        yield

    thread = started(lifespan)
    with pytest.raises(ConfigError, match="no store"):
        thread.wait_entered(HANG_S)
    thread.stop(HANG_S)


def test_a_lifespan_that_hangs_is_not_entered() -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        await asyncio.Event().wait()
        yield

    thread = started(lifespan)
    assert not thread.wait_entered(0.01)
    thread.stop(0.01)


def test_a_lifespan_whose_background_task_fails_ends() -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            yield

    async def fail() -> None:
        raise ConfigError("lost")

    thread = started(lifespan)
    assert isinstance(thread.ended.exception(HANG_S), ExceptionGroup)
    thread.stop(HANG_S)


def test_a_lifespan_that_does_not_end_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        yield
        await asyncio.Event().wait()

    thread = started(lifespan)
    assert thread.wait_entered(HANG_S)
    with caplog.at_level(logging.WARNING):
        thread.stop(0.01)
    assert "action=lifespan_abandoned" in caplog.text


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_task_that_exits_does_not_end_the_loop(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def stay() -> str:
        return "here"

    thread = started(new_loop=new_loop)
    assert thread.wait_entered(HANG_S)
    assert isinstance(asyncio.run_coroutine_threadsafe(leave(), thread.loop).exception(HANG_S), SystemExit)
    assert asyncio.run_coroutine_threadsafe(stay(), thread.loop).result(HANG_S) == "here"
    thread.stop(HANG_S)
