import asyncio
import threading
from collections import Counter
from typing import Any

import pytest
from support.engine_clients import run
from support.waiting import HANG_S, wait_until_async

from headpond.config.engine import RendererSettings
from headpond.errors import InfrastructureFailure
from headpond.renderers import NextTurn, PooledRenderer, RendererKey, RendererPools
from headpond.renderers.bytes_chatml import BytesChatmlRenderer
from headpond.turn import Ids

CALLERS = 64
HELLO = NextTurn(messages=[{"role": "user", "content": "hello"}])
KEY = RendererKey(backend="bytes-chatml", model="base")


class Builder:
    """Counts builds; they wait for `released`."""

    def __init__(self, *, failures: int = 0, released: bool = True) -> None:
        self.built = Counter[str]()
        self.released = threading.Event()
        self._failures = failures
        if released:
            self.released.set()

    def __call__(self, key: RendererKey) -> BytesChatmlRenderer:
        self.built[key.model] += 1
        assert self.released.wait(HANG_S)
        if self.built.total() <= self._failures:
            raise InfrastructureFailure("disk error")
        return BytesChatmlRenderer()


async def prompt_ids(pools: RendererPools, key: RendererKey = KEY) -> Ids:
    return await PooledRenderer(pools, key).prompt_ids(HELLO)


def test_concurrent_first_callers_share_one_build() -> None:
    async def main() -> None:
        builder = Builder(released=False)
        pools = RendererPools(builder, max_renderers=1)
        callers = [asyncio.create_task(prompt_ids(pools)) for _ in range(CALLERS)]
        await wait_until_async(lambda: builder.built)
        ticks = 0
        for _ in range(10):
            await asyncio.sleep(0)
            ticks += 1
        assert (ticks, sum(caller.done() for caller in callers)) == (10, 0)  # the loop runs while they wait
        builder.released.set()
        results = await asyncio.gather(*callers)
        assert len({ids.tobytes() for ids in results}) == 1
        assert builder.built == {"base": 1}

    run(main)


def test_cancelling_a_caller_does_not_cancel_the_build() -> None:
    async def main() -> None:
        builder = Builder(released=False)
        pools = RendererPools(builder)
        first, second = (asyncio.create_task(prompt_ids(pools)) for _ in range(2))
        await wait_until_async(lambda: builder.built)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        builder.released.set()
        assert len(await second)
        assert builder.built == {"base": 1}

    run(main)


def test_a_build_whose_callers_were_all_cancelled_serves_the_next_caller() -> None:
    async def main() -> None:
        builder = Builder(released=False)
        pools = RendererPools(builder)
        callers = [asyncio.create_task(prompt_ids(pools)) for _ in range(4)]
        await wait_until_async(lambda: builder.built)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        builder.released.set()
        await wait_until_async(lambda: pools.keys == [KEY])
        await prompt_ids(pools)
        assert builder.built == {"base": 1}

    run(main)


def test_a_failed_build_raises_in_all_callers_and_the_next_caller_builds_again() -> None:
    async def main() -> None:
        builder = Builder(failures=1, released=False)
        pools = RendererPools(builder)
        callers = [asyncio.create_task(prompt_ids(pools)) for _ in range(CALLERS)]
        await wait_until_async(lambda: builder.built)
        builder.released.set()
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert [str(error) for error in results] == ["disk error"] * CALLERS
        assert (builder.built, pools.keys) == ({"base": 1}, [])
        assert len(await prompt_ids(pools))
        assert builder.built == {"base": 2}

    run(main)


def test_a_failed_build_without_callers_is_not_cached() -> None:
    async def main() -> None:
        builder = Builder(failures=1, released=False)
        pools = RendererPools(builder)
        caller = asyncio.create_task(prompt_ids(pools))
        await wait_until_async(lambda: builder.built)
        caller.cancel()
        builder.released.set()
        await wait_until_async(lambda: not pools.building)
        assert len(await prompt_ids(pools))

    run(main)


@pytest.mark.parametrize(
    ("pin", "evaluation", "pools_built"), [("base", False, 1), (None, False, 8), ("base", True, 8), (None, True, 8)]
)
def test_adapters_share_the_pool_of_the_pinned_model(pin: str | None, evaluation: bool, pools_built: int) -> None:
    async def main() -> None:
        builder = Builder()
        pools = RendererPools(builder, max_renderers=1)
        settings = RendererSettings(backend="bytes-chatml", model=pin)
        keys = [RendererKey.of(settings, f"adapter-{number}", evaluation=evaluation) for number in range(8)]
        await asyncio.gather(*(prompt_ids(pools, key) for key in keys for _ in range(8)))
        assert len(builder.built) == builder.built.total() == len(pools.keys) == pools_built
        assert set(builder.built) == ({"base"} if pools_built == 1 else {f"adapter-{number}" for number in range(8)})

    run(main)


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"options": {"name": "x"}}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
def test_another_model_option_or_template_argument_is_another_key(change: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"backend": "bytes-chatml", "model": "base"}
    one, other = (RendererKey.of(RendererSettings(**values), "m") for values in (plain, {**plain, **change}))
    assert one != other
    assert one == RendererKey.of(RendererSettings(**plain), "another adapter")


def test_the_order_of_template_arguments_does_not_change_the_key() -> None:
    texts = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    keys = {RendererKey.of(RendererSettings(model="base", chat_template_kwargs=text), "m") for text in texts}
    assert len(keys) == 1


def test_the_least_recently_used_pool_is_dropped() -> None:
    async def main() -> None:
        builder = Builder()
        pools = RendererPools(builder, max_pools=2)
        one, two, three = (RendererKey(backend="bytes-chatml", model=name) for name in ("one", "two", "three"))
        for key in (one, two, one, three):
            await prompt_ids(pools, key)
        assert pools.keys == [one, three]
        await prompt_ids(pools, one)
        await prompt_ids(pools, two)
        assert builder.built == {"one": 1, "two": 2, "three": 1}
        assert pools.keys == [one, two]

    run(main)


def test_a_warmed_up_pool_is_not_built_again() -> None:
    async def main() -> None:
        builder = Builder()
        pools = RendererPools(builder)
        await PooledRenderer(pools, KEY).warm_up()
        builder.released.clear()
        assert len(await prompt_ids(pools)) > 0
        assert builder.built == {"base": 1}

    run(main)


class SlowRenderer(BytesChatmlRenderer):
    """Encodes after `released` is set, and records how many callers it has."""

    def __init__(self, released: threading.Event, concurrent: list[int]) -> None:
        self._released, self._concurrent, self._callers = released, concurrent, 0

    def render(self, *args: Any, **more: Any) -> Ids:
        self._callers += 1
        self._concurrent.append(self._callers)
        assert self._released.wait(HANG_S)
        self._callers -= 1
        return super().render(*args, **more)


def slow_pools(
    max_renderers: int, *, builds: int = 9
) -> tuple[RendererPools, threading.Event, list[int], Counter[str]]:
    """The event lets all renderers encode; beyond `builds`, building fails."""
    released, concurrent, built = threading.Event(), list[int](), Counter[str]()

    def build(key: RendererKey) -> SlowRenderer:
        built[key.model] += 1
        if built.total() > builds:
            raise InfrastructureFailure("no memory")
        return SlowRenderer(released, concurrent)

    return RendererPools(build, max_renderers=max_renderers), released, concurrent, built


def test_a_renderer_encodes_for_one_caller_at_a_time_even_if_that_one_was_cancelled() -> None:
    async def main() -> None:
        pools, released, concurrent, built = slow_pools(1)
        callers = [asyncio.create_task(prompt_ids(pools)) for _ in range(8)]
        await wait_until_async(lambda: concurrent)
        callers[0].cancel()
        callers[3].cancel()
        await asyncio.wait([callers[0], callers[3]])
        released.set()
        done = await asyncio.gather(*callers, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in done] == [n in (0, 3) for n in range(8)]
        assert (concurrent, built) == ([1] * 7, {"base": 1})

    run(main)


def test_a_pool_grows_to_its_limit_while_its_renderers_are_busy() -> None:
    async def main() -> None:
        pools, released, concurrent, built = slow_pools(2)
        callers = [asyncio.create_task(prompt_ids(pools)) for _ in range(8)]
        await wait_until_async(lambda: len(concurrent) == 2)
        released.set()
        await asyncio.gather(*callers)
        assert (max(concurrent), built, (await pools.pool(KEY)).renderers) == (1, {"base": 2}, 2)

    run(main)


def test_a_completion_is_parsed_while_the_renderer_encodes() -> None:
    async def main() -> None:
        pools, released, concurrent, _ = slow_pools(1)
        caller = asyncio.create_task(prompt_ids(pools))
        await wait_until_async(lambda: concurrent)
        ids = BytesChatmlRenderer().render([{"role": "user", "content": "x"}])
        message = await PooledRenderer(pools, KEY).message(ids[-3:], prompt_ids=ids, tools=None)
        assert message["role"] == "assistant"
        released.set()
        await caller

    run(main)


def test_a_pool_that_cannot_grow_keeps_its_renderers() -> None:
    async def main() -> None:
        pools, released, concurrent, built = slow_pools(2, builds=1)
        callers = [asyncio.create_task(prompt_ids(pools)) for _ in range(4)]
        await wait_until_async(lambda: built["base"] > 1)
        released.set()
        await asyncio.gather(*callers)
        assert (max(concurrent), (await pools.pool(KEY)).renderers) == (1, 1)

    run(main)
