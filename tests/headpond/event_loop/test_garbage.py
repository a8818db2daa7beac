import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest
from support.waiting import wait_until_async

from headpond.event_loop import garbage


class Cycle:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def dropped_cycle() -> "weakref.ref[Cycle]":
    return weakref.ref(Cycle())


def collecting(body: Callable[[list[bool]], Awaitable[None]]) -> None:
    """Run `body` with paced collection; it sets whether there is work."""

    async def main() -> None:
        busy = [True]
        async with garbage.paced_collection(lambda: busy[0]):
            await asyncio.sleep(0)  # the collector starts with work to do
            await body(busy)

    asyncio.run(main())


def test_young_cycles_are_collected_during_work() -> None:
    async def body(_: list[bool]) -> None:
        reference = dropped_cycle()
        await wait_until_async(lambda: reference() is None)

    collecting(body)


def test_old_cycles_are_collected_when_work_ends() -> None:
    async def body(busy: list[bool]) -> None:
        old = Cycle()
        reference = weakref.ref(old)
        gc.collect(garbage.YOUNGEST)
        del old
        gc.collect(garbage.YOUNGEST)
        assert reference() is not None
        busy[0] = False
        await wait_until_async(lambda: reference() is None)

    collecting(body)


def test_old_cycles_are_collected_at_intervals_during_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "FULL_INTERVAL_S", 0.1)

    async def body(_: list[bool]) -> None:
        old = Cycle()
        reference = weakref.ref(old)
        gc.collect(garbage.YOUNGEST)
        del old
        await wait_until_async(lambda: reference() is None)

    collecting(body)


def test_automatic_collection_is_restored_afterwards() -> None:
    async def body(_: list[bool]) -> None:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0

    assert gc.isenabled()
    collecting(body)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def aging(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with garbage.aging_collection():
            await body()

    asyncio.run(main())


def test_objects_that_live_for_long_are_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "AGING_S", 0.0)

    async def body() -> None:
        kept = [Cycle() for _ in range(1000)]
        young = dropped_cycle()
        await wait_until_async(lambda: not any(isinstance(each, Cycle) for each in gc.get_objects()))  # frozen or gone
        assert young() is None
        reference = weakref.ref(kept.pop())
        gc.collect()
        assert reference() is not None, "it is frozen"

    aging(body)
    assert gc.isenabled()
    gc.unfreeze()


def test_frozen_cycles_are_collected_at_long_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "AGING_S", 0.0)
    monkeypatch.setattr(garbage, "AGING_FULL_S", 0.5)

    async def body() -> None:
        old = Cycle()
        reference = weakref.ref(old)
        frozen = gc.get_freeze_count()
        await wait_until_async(lambda: gc.get_freeze_count() > frozen)
        del old
        await wait_until_async(lambda: reference() is None)

    aging(body)
    gc.unfreeze()


def test_cycles_are_collected_seldom_and_thresholds_are_restored() -> None:
    before = gc.get_threshold()
    with garbage.seldom_collection():
        reference, kept = dropped_cycle(), [[] for _ in range(before[0] + 1)]
        assert reference() is not None
        kept += [[] for _ in range(garbage.SELDOM_OBJECTS)]
        assert reference() is None
    assert kept
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
