import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest
from support.waiting import wait_until_async

from penstock.runtime import garbage


class Knot:
    """Refers to itself, so only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def knot() -> "weakref.ref[Knot]":
    return weakref.ref(Knot())


def play(scene: Callable[[list[bool]], Awaitable[None]]) -> None:
    """`scene` says whether there is work."""

    async def main() -> None:
        busy = [True]
        async with garbage.paced_collection(lambda: busy[0]):
            await asyncio.sleep(0)  # it has seen that there is work
            await scene(busy)

    asyncio.run(main())


def test_young_cycles_go_while_there_is_work() -> None:
    async def scene(_: list[bool]) -> None:
        left = knot()
        await wait_until_async(lambda: left() is None)

    play(scene)


def test_old_ones_go_when_the_work_ends() -> None:
    async def scene(busy: list[bool]) -> None:
        old = Knot()
        left = weakref.ref(old)
        gc.collect(garbage.YOUNG)
        del old
        gc.collect(garbage.YOUNG)
        assert left() is not None
        busy[0] = False
        await wait_until_async(lambda: left() is None)

    play(scene)


def test_old_ones_go_in_the_end_even_if_the_work_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "ALL_S", 0.1)

    async def scene(_: list[bool]) -> None:
        old = Knot()
        left = weakref.ref(old)
        gc.collect(garbage.YOUNG)
        del old
        await wait_until_async(lambda: left() is None)

    play(scene)


def test_python_collects_as_usual_before_and_after() -> None:
    async def scene(_: list[bool]) -> None:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0

    assert gc.isenabled()
    play(scene)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
