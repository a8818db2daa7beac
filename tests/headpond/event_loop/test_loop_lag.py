import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
import redis.asyncio
from support.waiting import wait_until_async

from headpond.event_loop import loop_lag
from headpond.event_loop.factory import event_loop_factory
from headpond.event_loop.lag_summaries import (
    LAG_KEY,
    LAG_TTL_S,
    LagSummary,
    read_summaries,
    read_summaries_async,
    redis_publisher,
)
from headpond.event_loop.loop_lag import LIMITS_S, LagTrace, LoopLag
from headpond.processes.embedded_redis import EmbeddedRedis

BLOCK_S = 0.2


def run(coroutine) -> None:
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(coroutine)


@contextlib.asynccontextmanager
async def sampling(lag: LoopLag) -> AsyncIterator[None]:
    task = asyncio.create_task(lag.run())
    await wait_until_async(lambda: lag.summary().samples > 1, what="the first samples")
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def next_tick(lag: LoopLag) -> None:
    tick = lag.last_tick
    await wait_until_async(lambda: lag.last_tick > tick, what="the next sample")


def block(seconds: float) -> None:
    time.sleep(seconds)


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_block_shows_in_the_window() -> None:
    async def main() -> None:
        lag = LoopLag(process="test", interval_s=0.005)
        async with sampling(lag):
            block(BLOCK_S)
            await next_tick(lag)
            summary = lag.summary()
        assert summary.max_s >= BLOCK_S - 0.01
        assert summary.blocked_s >= summary.max_s
        assert 0 <= summary.min_s <= summary.median_s <= summary.p90_s <= summary.p99_s <= summary.max_s
        assert summary.process == "test"

    run(main())


def test_a_block_that_has_not_ended_is_visible_from_another_thread() -> None:
    async def main() -> None:
        lag = LoopLag(process="test", interval_s=0.005)
        blocked, still_blocked = threading.Event(), []

        def watch() -> None:
            tick = lag.last_tick
            while lag.summary().max_s < BLOCK_S:
                time.sleep(0.005)
            still_blocked.append(lag.last_tick == tick)
            blocked.set()

        async with sampling(lag):
            watcher = threading.Thread(target=watch)
            watcher.start()
            assert blocked.wait(30)
            watcher.join()
        assert still_blocked == [True]

    run(main())


def test_the_cpu_share_distinguishes_a_busy_loop_from_a_waiting_one() -> None:
    async def cpu_seconds(action) -> float:
        lag = LoopLag(process="test", interval_s=0.005)
        async with sampling(lag):
            action(BLOCK_S)
            await next_tick(lag)
            summary = lag.summary()
        assert summary.blocked_s > BLOCK_S - 0.01
        return summary.cpu_share * summary.window_s

    async def main() -> None:
        assert await cpu_seconds(burn) > BLOCK_S - 0.01
        assert await cpu_seconds(block) < BLOCK_S / 2

    run(main())


def test_a_summary_covers_only_its_window() -> None:
    async def main() -> None:
        lag = LoopLag(process="test", interval_s=0.005, window_s=0.1)
        async with sampling(lag):
            block(BLOCK_S)
            await next_tick(lag)
            longest_s = lag.drain().max_s
            assert longest_s >= BLOCK_S - 0.01
            await wait_until_async(lambda: lag.summary().max_s < longest_s, what="the block leaves the window")
        assert lag.summary().window_s < 60

    run(main())


def test_before_the_first_sample_everything_is_zero() -> None:
    summary = LoopLag(process="test").summary()
    assert (summary.samples, summary.max_s, summary.blocked_s, summary.cpu_share) == (0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("longest_s", "level"), [(60.0, logging.INFO), (0.1, logging.WARNING)])
def test_every_window_logs_a_line_and_warns_above_a_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, longest_s: float, level: int
) -> None:
    for name, limit_s in {"p90_s": 60.0, "p99_s": 60.0, "max_s": longest_s}.items():
        monkeypatch.setitem(LIMITS_S, name, limit_s)

    async def main() -> None:
        async with sampling(LoopLag(process="test", interval_s=0.005, window_s=0.1)):
            block(BLOCK_S)
            await wait_until_async(lambda: len(caplog.records) >= 2, what="two lines")

    with caplog.at_level(logging.INFO, logger="headpond.loop_lag"):
        run(main())
    worst = max(caplog.records, key=lambda record: record.levelno)
    assert worst.levelno == level
    assert worst.message.startswith("action=loop_lag process=test samples=")
    assert ("above_limit=max_s" in worst.message) == (level == logging.WARNING)


def test_a_failing_publish_is_logged_once_per_outage_and_sampling_continues(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        outcomes = iter([False, False, True, True, False, False])
        done = asyncio.Event()

        async def publish(summary: LagSummary) -> None:
            works = next(outcomes, None)
            if works is None:
                done.set()
            elif not works:
                raise OSError("Redis is gone")

        lag = LoopLag(process="test", interval_s=0.005, window_s=0.02, publish=publish)
        async with sampling(lag):
            await done.wait()
            await next_tick(lag)

    run(main())
    warnings = [record.message.split()[0] for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["action=loop_lag_unpublished"] * 2


def test_a_hanging_publish_does_not_stop_sampling() -> None:
    async def main() -> None:
        hanging = asyncio.Event()

        async def publish(summary: LagSummary) -> None:
            hanging.set()
            await asyncio.Event().wait()

        lag = LoopLag(process="test", interval_s=0.005, window_s=0.02, publish=publish)
        async with sampling(lag):
            await hanging.wait()
            await next_tick(lag)

    run(main())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(Path(tmp_path_factory.mktemp("redis")), appendonly=False) as server:
        yield server


def test_published_summaries_can_be_read_by_other_processes(server: EmbeddedRedis) -> None:
    async def main() -> None:
        async with redis.asyncio.Redis.from_url(server.url, socket_timeout=None) as client:
            publish = redis_publisher(client)
            lags = [LoopLag(process=name, window_s=0.02, interval_s=0.005, publish=publish) for name in ("b", "a")]
            async with sampling(lags[0]), sampling(lags[1]):
                await wait_until_async(lambda: len(read_summaries(reader)) == 2, what="both processes published")
            assert await read_summaries_async(client) == read_summaries(reader)

    with redis.Redis.from_url(server.url) as reader:
        assert read_summaries(reader) == []
        run(main())
        assert [summary.process for summary in read_summaries(reader)] == ["a", "b"]
        assert all(summary.samples for summary in read_summaries(reader))
        assert 0 < reader.ttl("headpond:lag:a") <= LAG_TTL_S


def test_values_of_another_version_are_ignored(server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(server.url) as client:
        for name, value in (("x", "not JSON"), ("y", "[]"), ("z", '{"process": "z"}')):
            client.set(LAG_KEY.format(process=name), value, ex=LAG_TTL_S)
        assert not {"x", "y", "z"} & {summary.process for summary in read_summaries(client)}


def test_draining_returns_all_samples_since_the_last_call_once() -> None:
    async def main() -> None:
        lag = LoopLag(process="test", interval_s=0.005, window_s=0.02)
        async with sampling(lag):
            block(BLOCK_S)
            await next_tick(lag)
            await wait_until_async(lambda: lag.summary().max_s < BLOCK_S / 2, what="the block has left the window")
            drained = lag.drain()
            assert drained.max_s >= 0.8 * BLOCK_S
            assert drained.blocked_s >= 0.8 * BLOCK_S
            assert drained.window_s >= BLOCK_S
            assert lag.drain().samples == 0

    run(main())


def test_samples_that_are_not_drained_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headpond.event_loop.loop_lag.MAX_UNREAD_SAMPLES", 4)

    async def main() -> None:
        lag = LoopLag(process="test", interval_s=0.001, window_s=10.0)
        async with sampling(lag):
            await wait_until_async(lambda: lag.summary().samples > 20, what="more samples than are kept")
            assert 1 <= lag.drain().samples <= 4

    run(main())


def test_a_summary_can_be_converted_to_a_dictionary_and_back() -> None:
    summary = LoopLag(process="test").summary()
    assert LagSummary.from_dict(summary.as_dict()) == summary


@pytest.mark.parametrize("samples", [1, 2, 3, 200])
def test_quantiles_equal_numpys(samples: int) -> None:
    lags_s = np.random.default_rng(samples).random(samples)
    summary = LoopLag(process="test")._summary(lags_s.tolist(), wall_s=1.0, cpu_s=0.0)
    quantiles = [summary.min_s, summary.median_s, summary.p90_s, summary.p99_s, summary.max_s]
    assert quantiles == pytest.approx(np.quantile(lags_s, [0, 0.5, 0.9, 0.99, 1]))


BLOCKS_MOST = 50


def blocked_by(
    block: Callable[[], object], *, limit_s: float = 0.03, until: Callable[[dict[str, float]], bool] = lambda _: True
) -> tuple[LagSummary, LagTrace]:
    """The summary and the trace of a loop on which `block` ran: again, until the blockers are as expected, because the
    thread that looks may get no processor in the meantime."""
    trace = LagTrace(limit_s)

    async def main() -> LagSummary:
        lag = LoopLag(process="tests", interval_s=0.01, trace=trace)
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(lag.run())
            await asyncio.sleep(0.05)
            for _ in range(BLOCKS_MOST):
                block()
                await asyncio.sleep(0.05)
                summary = lag.summary()
                if until(summary.blockers):
                    break
            sampling.cancel()
        return summary

    return asyncio.run(main()), trace


def planted_blocker() -> None:
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass


def catastrophic_pattern() -> object:
    return re.match(r"(a+)+$", "a" * 22 + "b")


def test_blocking_code_is_named_with_its_line() -> None:
    def is_named(blockers: dict[str, float]) -> bool:
        pattern = re.compile(r"planted_blocker \(event_loop/test_loop_lag.py:\d+\)")
        return any(pattern.fullmatch(name) and seconds > 0.1 for name, seconds in blockers.items())

    summary, _ = blocked_by(planted_blocker, until=is_named)
    assert is_named(summary.blockers)


def test_blocking_in_a_library_is_named_with_the_calling_line() -> None:
    def is_named(blockers: dict[str, float]) -> bool:
        return any(name.startswith("catastrophic_pattern (event_loop/test_loop_lag.py:") for name in blockers)

    summary, _ = blocked_by(catastrophic_pattern, until=is_named)
    assert is_named(summary.blockers)


def test_a_loop_on_time_has_no_blockers() -> None:
    summary, trace = blocked_by(lambda: None, limit_s=5.0)
    assert summary.blockers == {}
    assert "lag-trace" not in {thread.name for thread in threading.enumerate()}
    assert trace.blockers() == {}


def test_the_number_of_blockers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "MAX_BLOCKERS", 1)
    trace = LagTrace(0.03)
    for name in ("one", "another", "a third"):
        trace._add(name, since=0.0, now=1.0, first=False)
    assert trace.blockers() == {"others": 2.0, "one": 1.0}
