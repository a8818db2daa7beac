from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from kombu.asynchronous.hub import Hub
from support.waiting import wait_until

from headpond.event_loop.factory import event_loop_factory
from headpond.workers.hub_calls import HubCalls
from headpond.workers.loop_thread import LoopThread


@asynccontextmanager
async def nothing() -> AsyncGenerator[None]:
    yield


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread(event_loop_factory()(), nothing)
    thread.start()
    yield thread
    thread.stop(10)


@pytest.fixture
def calls(thread: LoopThread) -> HubCalls:
    return HubCalls(thread.loop)


@pytest.fixture
def post(thread: LoopThread, calls: HubCalls) -> Callable[..., None]:
    return lambda call, *args: thread.loop.call_soon_threadsafe(calls.post, call, *args)


def run(hub: Hub, done: Callable[[], bool]) -> None:
    def turned() -> bool:
        hub.run_once()
        return done()

    wait_until(turned)


def test_calls_run_on_the_hub_in_order(calls: HubCalls, post: Callable[..., None]) -> None:
    hub, results = Hub(), list[int]()
    calls.register(hub)
    for n in range(1000):
        post(results.append, n)
    run(hub, lambda: len(results) == 1000)
    assert results == list(range(1000))


def test_calls_after_one_that_raises_still_run(calls: HubCalls, post: Callable[..., None]) -> None:
    hub, results = Hub(), list[int]()
    calls.register(hub)
    post(results.append, 0)
    post(results.remove, 1)
    post(results.append, 2)
    with pytest.raises(ValueError, match="not in list"):
        run(hub, lambda: len(results) == 2)
    run(hub, lambda: len(results) == 2)
    assert results == [0, 2]


def test_calls_survive_the_hubs_reset_by_a_reconnection(calls: HubCalls, post: Callable[..., None]) -> None:
    hub, results = Hub(), list[int]()
    calls.register(hub)
    post(results.append, 1)
    hub.reset()
    post(results.append, 2)
    calls.register(hub)
    run(hub, lambda: len(results) == 2)
    assert results == [1, 2]


def test_calls_run_without_a_hub_that_polls(calls: HubCalls, post: Callable[..., None]) -> None:
    results = list[int]()
    post(results.append, 1)

    def ran() -> bool:
        calls.run()
        return results == [1]

    wait_until(ran)
