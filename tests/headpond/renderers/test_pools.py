import asyncio
import threading
from typing import Any

import pytest
from support.engine_clients import run
from support.waiting import HANG_S, wait_until_async

from headpond.config.engine import RendererSettings
from headpond.errors import InfrastructureFailure
from headpond.renderers import NextTurn, PooledRenderer, pools
from headpond.renderers.bytes_chatml import BytesChatmlRenderer
from headpond.turn import Ids

CALLERS = 64
HELLO = NextTurn(messages=[{"role": "user", "content": "hello"}])


class Builder:
    """Counts builds; they wait for `released`."""

    def __init__(self, *, failures: int = 0, released: bool = True) -> None:
        self.built = 0
        self.released = threading.Event()
        self._failures = failures
        if released:
            self.released.set()

    def __call__(self) -> BytesChatmlRenderer:
        self.built += 1
        assert self.released.wait(HANG_S)
        if self.built <= self._failures:
            raise InfrastructureFailure("disk error")
        return BytesChatmlRenderer()


def test_concurrent_first_callers_share_one_build() -> None:
    async def main() -> None:
        builder = Builder(released=False)
        renderer = PooledRenderer(builder, max_renderers=1)
        callers = [asyncio.create_task(renderer.prompt_ids(HELLO)) for _ in range(CALLERS)]
        await wait_until_async(lambda: builder.built)
        ticks = 0
        for _ in range(10):
            await asyncio.sleep(0)
            ticks += 1
        assert (ticks, sum(caller.done() for caller in callers)) == (10, 0)  # the loop runs while they wait
        builder.released.set()
        results = await asyncio.gather(*callers)
        assert len({ids.tobytes() for ids in results}) == 1
        assert builder.built == 1

    run(main)


def test_cancelling_a_caller_does_not_cancel_the_build() -> None:
    async def main() -> None:
        builder = Builder(released=False)
        renderer = PooledRenderer(builder)
        first, second = (asyncio.create_task(renderer.prompt_ids(HELLO)) for _ in range(2))
        await wait_until_async(lambda: builder.built)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        builder.released.set()
        assert len(await second)
        assert builder.built == 1

    run(main)


def test_a_build_whose_callers_were_all_cancelled_serves_the_next_caller() -> None:
    async def main() -> None:
        builder = Builder(released=False)
        renderer = PooledRenderer(builder)
        callers = [asyncio.create_task(renderer.prompt_ids(HELLO)) for _ in range(4)]
        await wait_until_async(lambda: builder.built)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        builder.released.set()
        await renderer.prompt_ids(HELLO)
        assert builder.built == 1

    run(main)


def test_a_failed_build_raises_in_all_callers_and_the_next_caller_builds_again() -> None:
    async def main() -> None:
        builder = Builder(failures=1, released=False)
        renderer = PooledRenderer(builder)
        callers = [asyncio.create_task(renderer.prompt_ids(HELLO)) for _ in range(CALLERS)]
        await wait_until_async(lambda: builder.built)
        builder.released.set()
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert [str(error) for error in results] == ["disk error"] * CALLERS
        assert builder.built == 1
        assert len(await renderer.prompt_ids(HELLO))
        assert builder.built == 2

    run(main)


def test_a_failed_build_without_callers_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        builder = Builder(failures=1, released=False)
        renderer = PooledRenderer(builder)
        caller = asyncio.create_task(renderer.prompt_ids(HELLO))
        await wait_until_async(lambda: builder.built)
        caller.cancel()
        builder.released.set()
        await wait_until_async(lambda: "action=renderer_not_built" in caplog.text)
        assert len(await renderer.prompt_ids(HELLO))

    run(main)


@pytest.mark.parametrize(("pin", "model"), [("base", "base"), (None, "served")])
def test_a_pinned_model_goes_before_that_of_the_engine(
    pin: str | None, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: dict[str, Any] = {}
    monkeypatch.setattr(pools, "ProcessRenderer", built.update)
    pools.build(RendererSettings(backend="directory", model=pin, chat_template_kwargs={"a": 1}), "served")
    assert built == {"backend": "directory", "model": model, "options": {}, "template": {"a": 1}}


def test_a_warmed_up_pool_is_not_built_again() -> None:
    async def main() -> None:
        builder = Builder()
        renderer = PooledRenderer(builder)
        await renderer.pool()
        builder.released.clear()
        assert len(await renderer.prompt_ids(HELLO)) > 0
        assert builder.built == 1

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


def slow_renderer(
    max_renderers: int, *, builds: int = 9
) -> tuple[PooledRenderer, threading.Event, list[int], list[SlowRenderer]]:
    """The event lets all renderers encode; beyond `builds`, building fails."""
    released, concurrent, built = threading.Event(), list[int](), list[SlowRenderer]()

    def build() -> SlowRenderer:
        built.append(SlowRenderer(released, concurrent))
        if len(built) > builds:
            raise InfrastructureFailure("no memory")
        return built[-1]

    return PooledRenderer(build, max_renderers=max_renderers), released, concurrent, built


def test_a_renderer_encodes_for_one_caller_at_a_time_even_if_that_one_was_cancelled() -> None:
    async def main() -> None:
        renderer, released, concurrent, built = slow_renderer(1)
        callers = [asyncio.create_task(renderer.prompt_ids(HELLO)) for _ in range(8)]
        await wait_until_async(lambda: concurrent)
        callers[0].cancel()
        callers[3].cancel()
        await asyncio.wait([callers[0], callers[3]])
        released.set()
        done = await asyncio.gather(*callers, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in done] == [n in (0, 3) for n in range(8)]
        assert (concurrent, len(built)) == ([1] * 7, 1)

    run(main)


def test_a_pool_grows_to_its_limit_while_its_renderers_are_busy() -> None:
    async def main() -> None:
        renderer, released, concurrent, built = slow_renderer(2)
        callers = [asyncio.create_task(renderer.prompt_ids(HELLO)) for _ in range(8)]
        await wait_until_async(lambda: len(concurrent) == 2)
        released.set()
        await asyncio.gather(*callers)
        assert (max(concurrent), len(built), (await renderer.pool()).renderers) == (1, 2, 2)

    run(main)


def test_a_completion_is_parsed_while_the_renderer_encodes() -> None:
    async def main() -> None:
        renderer, released, concurrent, _ = slow_renderer(1)
        caller = asyncio.create_task(renderer.prompt_ids(HELLO))
        await wait_until_async(lambda: concurrent)
        ids = BytesChatmlRenderer().render([{"role": "user", "content": "x"}])
        message = await renderer.message(ids[-3:], prompt_ids=ids, tools=None)
        assert message["role"] == "assistant"
        released.set()
        await caller

    run(main)


def test_a_pool_that_cannot_grow_keeps_its_renderers() -> None:
    async def main() -> None:
        renderer, released, concurrent, built = slow_renderer(2, builds=1)
        callers = [asyncio.create_task(renderer.prompt_ids(HELLO)) for _ in range(4)]
        await wait_until_async(lambda: len(built) > 1)
        released.set()
        await asyncio.gather(*callers)
        assert (max(concurrent), (await renderer.pool()).renderers) == (1, 1)

    run(main)
