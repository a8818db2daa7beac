import asyncio

import pytest
from support.waiting import wait_until, wait_until_async


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
