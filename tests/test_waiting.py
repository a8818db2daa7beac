import asyncio

import pytest
from support.waiting import unless_failed, wait_until, wait_until_async


def test_the_first_true_value_is_returned() -> None:
    values = iter([0, None, [], "ready", "later"])
    assert wait_until(lambda: next(values)) == "ready"


def test_a_timeout_names_the_condition_and_the_last_value() -> None:
    with pytest.raises(AssertionError, match="waited 0 s for: the worker starts; last value: 0"):
        wait_until(lambda: 0, timeout_s=0, what="the worker starts")


def test_the_asynchronous_version_takes_functions_and_coroutine_functions() -> None:
    async def main() -> None:
        ready = asyncio.Event()
        asyncio.get_running_loop().call_soon(ready.set)
        assert await wait_until_async(ready.is_set)
        assert await wait_until_async(ready.wait)
        with pytest.raises(AssertionError, match="waited 0 s for: never; last value: False"):
            await wait_until_async(asyncio.Event().is_set, timeout_s=0, what="never")

    asyncio.run(main())


def test_a_task_that_fails_ends_what_waits_for_it() -> None:
    async def fail() -> None:
        raise KeyError("played")

    async def main() -> None:
        ready = asyncio.Event()
        waiting = asyncio.create_task(ready.wait())
        playing = [asyncio.create_task(ready.wait()), asyncio.create_task(fail())]
        with pytest.raises(KeyError, match="played"):
            await unless_failed(waiting, playing)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        ready.set()
        assert await unless_failed(ready.wait(), playing[:1])

    asyncio.run(main())


def test_work_that_fails_names_the_tasks_that_had_ended() -> None:
    async def result() -> str:
        return "context limit"

    async def main() -> None:
        playing = asyncio.create_task(result())
        with pytest.raises(AssertionError) as failure:
            await unless_failed(wait_until_async(lambda: False, timeout_s=0.1, what="never"), [playing])
        assert failure.value.__notes__ == ["ended before: 'context limit'"]

    asyncio.run(main())
