import asyncio
import threading
from collections import Counter
from typing import Any

import pytest
from support.engine_clients import run
from support.waiting import wait_until_async

from penstock.config.engine import RendererSettings
from penstock.errors import InfrastructureFailure
from penstock.renderers import NextTurn, PooledRenderer, RendererKey, RendererPools
from penstock.renderers.backends import BytesChatml
from penstock.turn import Ids

CALLERS = 64
HELLO = NextTurn(messages=[{"role": "user", "content": "hello"}])
KEY = RendererKey(backend="bytes-chatml", model="base")


class Builder:
    """Builds when it is let, and counts."""

    def __init__(self, *, failures: int = 0, let: bool = True) -> None:
        self.built = Counter[str]()
        self.going_on = threading.Event()
        self._failures = failures
        if let:
            self.going_on.set()

    def __call__(self, key: RendererKey) -> BytesChatml:
        self.built[key.model] += 1
        assert self.going_on.wait(30)
        if self.built.total() <= self._failures:
            raise InfrastructureFailure("the disk hiccupped")
        return BytesChatml()


async def asking(pools: RendererPools, key: RendererKey = KEY) -> Ids:
    return await PooledRenderer(pools, key).prompt_ids(HELLO)


def test_however_many_callers_come_first_one_renderer_is_built() -> None:
    async def main() -> None:
        builder = Builder(let=False)
        pools = RendererPools(builder, renderers_most=1)
        callers = [asyncio.create_task(asking(pools)) for _ in range(CALLERS)]
        await wait_until_async(lambda: builder.built)
        ticks = 0
        for _ in range(10):
            await asyncio.sleep(0)
            ticks += 1
        assert (ticks, sum(caller.done() for caller in callers)) == (10, 0)  # the loop runs while they wait
        builder.going_on.set()
        found = await asyncio.gather(*callers)
        assert len({ids.tobytes() for ids in found}) == 1
        assert builder.built == {"base": 1}

    run(main)


def test_a_caller_that_gives_up_does_not_take_the_build_along() -> None:
    async def main() -> None:
        builder = Builder(let=False)
        pools = RendererPools(builder)
        first, second = (asyncio.create_task(asking(pools)) for _ in range(2))
        await wait_until_async(lambda: builder.built)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        builder.going_on.set()
        assert len(await second)
        assert builder.built == {"base": 1}

    run(main)


def test_what_everybody_gave_up_on_is_there_for_the_next() -> None:
    async def main() -> None:
        builder = Builder(let=False)
        pools = RendererPools(builder)
        callers = [asyncio.create_task(asking(pools)) for _ in range(4)]
        await wait_until_async(lambda: builder.built)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        builder.going_on.set()
        await wait_until_async(lambda: pools.keys == [KEY])
        await asking(pools)
        assert builder.built == {"base": 1}

    run(main)


def test_a_failure_reaches_all_who_wait_and_the_next_caller_builds_again() -> None:
    async def main() -> None:
        builder = Builder(failures=1, let=False)
        pools = RendererPools(builder)
        callers = [asyncio.create_task(asking(pools)) for _ in range(CALLERS)]
        await wait_until_async(lambda: builder.built)
        builder.going_on.set()
        found = await asyncio.gather(*callers, return_exceptions=True)
        assert [str(error) for error in found] == ["the disk hiccupped"] * CALLERS
        assert (builder.built, pools.keys) == ({"base": 1}, [])
        assert len(await asking(pools))
        assert builder.built == {"base": 2}

    run(main)


def test_a_failure_that_nobody_waits_for_is_forgotten_too() -> None:
    async def main() -> None:
        builder = Builder(failures=1, let=False)
        pools = RendererPools(builder)
        caller = asyncio.create_task(asking(pools))
        await wait_until_async(lambda: builder.built)
        caller.cancel()
        builder.going_on.set()
        await wait_until_async(lambda: not pools.building)
        assert len(await asking(pools))

    run(main)


@pytest.mark.parametrize(
    ("pin", "evaluation", "pools_built"), [("base", False, 1), (None, False, 8), ("base", True, 8), (None, True, 8)]
)
def test_adapters_share_the_pool_of_the_model_that_is_pinned(
    pin: str | None, evaluation: bool, pools_built: int
) -> None:
    async def main() -> None:
        builder = Builder()
        pools = RendererPools(builder, renderers_most=1)
        settings = RendererSettings(backend="bytes-chatml", model=pin)
        keys = [RendererKey.of(settings, f"adapter-{number}", evaluation=evaluation) for number in range(8)]
        await asyncio.gather(*(asking(pools, key) for key in keys for _ in range(8)))
        assert len(builder.built) == builder.built.total() == len(pools.keys) == pools_built
        assert set(builder.built) == ({"base"} if pools_built == 1 else {f"adapter-{number}" for number in range(8)})

    run(main)


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"options": {"name": "x"}}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
def test_another_model_configuration_or_template_argument_is_another_pool(change: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"backend": "bytes-chatml", "model": "base"}
    one, other = (RendererKey.of(RendererSettings(**values), "m") for values in (plain, {**plain, **change}))
    assert one != other
    assert one == RendererKey.of(RendererSettings(**plain), "another adapter")


def test_the_order_in_which_arguments_are_written_makes_no_difference() -> None:
    texts = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    keys = {RendererKey.of(RendererSettings(model="base", chat_template_kwargs=text), "m") for text in texts}
    assert len(keys) == 1


def test_the_pool_that_was_not_used_for_longest_goes() -> None:
    async def main() -> None:
        builder = Builder()
        pools = RendererPools(builder, pools_most=2)
        one, two, three = (RendererKey(backend="bytes-chatml", model=name) for name in ("one", "two", "three"))
        for key in (one, two, one, three):
            await asking(pools, key)
        assert pools.keys == [one, three]
        await asking(pools, one)
        await asking(pools, two)
        assert builder.built == {"one": 1, "two": 2, "three": 1}
        assert pools.keys == [one, two]

    run(main)


def test_what_is_warm_is_not_built_when_it_is_needed() -> None:
    async def main() -> None:
        builder = Builder()
        pools = RendererPools(builder)
        await PooledRenderer(pools, KEY).warm_up()
        builder.going_on.clear()
        assert len(await asking(pools)) > 0
        assert builder.built == {"base": 1}

    run(main)


class Slow(BytesChatml):
    """Encodes when it is let, and notices company."""

    def __init__(self, going_on: threading.Event, seen: list[int]) -> None:
        self._going_on, self._seen, self._inside = going_on, seen, 0

    def render(self, *args: Any, **more: Any) -> Ids:
        self._inside += 1
        self._seen.append(self._inside)
        assert self._going_on.wait(30)
        self._inside -= 1
        return super().render(*args, **more)


def slow_pools(
    renderers_most: int, *, builds: int = 9
) -> tuple[RendererPools, threading.Event, list[int], Counter[str]]:
    """The event lets all of them encode; beyond `builds`, building fails."""
    going_on, seen, built = threading.Event(), list[int](), Counter[str]()

    def build(key: RendererKey) -> Slow:
        built[key.model] += 1
        if built.total() > builds:
            raise InfrastructureFailure("no memory")
        return Slow(going_on, seen)

    return RendererPools(build, renderers_most=renderers_most), going_on, seen, built


def test_a_renderer_encodes_for_one_caller_at_a_time_even_when_that_one_gave_up() -> None:
    async def main() -> None:
        pools, going_on, seen, built = slow_pools(1)
        callers = [asyncio.create_task(asking(pools)) for _ in range(8)]
        await wait_until_async(lambda: seen)
        callers[0].cancel()
        callers[3].cancel()
        await asyncio.wait([callers[0], callers[3]])
        going_on.set()
        done = await asyncio.gather(*callers, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in done] == [n in (0, 3) for n in range(8)]
        assert (seen, built) == ([1] * 7, {"base": 1})

    run(main)


def test_a_pool_grows_while_its_renderers_are_busy_up_to_its_bound() -> None:
    async def main() -> None:
        pools, going_on, seen, built = slow_pools(2)
        callers = [asyncio.create_task(asking(pools)) for _ in range(8)]
        await wait_until_async(lambda: len(seen) == 2)
        going_on.set()
        await asyncio.gather(*callers)
        assert (max(seen), built, (await pools.pool(KEY)).renderers) == (1, {"base": 2}, 2)

    run(main)


def test_an_answer_is_read_while_the_renderer_encodes() -> None:
    async def main() -> None:
        pools, going_on, seen, _ = slow_pools(1)
        caller = asyncio.create_task(asking(pools))
        await wait_until_async(lambda: seen)
        ids = BytesChatml().render([{"role": "user", "content": "x"}])
        said = await PooledRenderer(pools, KEY).message(ids[-3:], prompt_ids=ids, tools=None)
        assert said["role"] == "assistant"
        going_on.set()
        await caller

    run(main)


def test_a_pool_that_cannot_grow_goes_on_with_what_it_has() -> None:
    async def main() -> None:
        pools, going_on, seen, built = slow_pools(2, builds=1)
        callers = [asyncio.create_task(asking(pools)) for _ in range(4)]
        await wait_until_async(lambda: built["base"] > 1)
        going_on.set()
        await asyncio.gather(*callers)
        assert (max(seen), (await pools.pool(KEY)).renderers) == (1, 1)

    run(main)
