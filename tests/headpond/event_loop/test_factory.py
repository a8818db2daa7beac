import asyncio
import logging
import sys

import pytest
import uvloop

from headpond.event_loop import factory
from headpond.event_loop.factory import event_loop_factory


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_the_loop_is_uvloops() -> None:
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        assert isinstance(runner.run(running_loop()), uvloop.Loop)


def test_without_uvloop_asyncios_loop_is_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    factory._fastest_loop.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with asyncio.Runner(loop_factory=event_loop_factory(concurrency=2)) as runner:
                assert not isinstance(runner.run(running_loop()), uvloop.Loop)
    assert [record.message.split()[0] for record in caplog.records] == ["action=no_uvloop"]
    factory._fastest_loop.cache_clear()
