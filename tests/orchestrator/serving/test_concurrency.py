"""The limit of rollouts in flight under an engine that is behind, idle or silent."""

import asyncio
import re
from itertools import count
from pathlib import Path

import pytest
from support.upstream import Response, serving
from support.waiting import wait_until_async

from headpond.config import RunConfig
from headpond.config.engine import Engine
from headpond.config.run import Rollouts
from headpond.engines.replicas.control import Load, Replica
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.serving.concurrency import ADJUST_S, InFlightLimit, LoadWatch

IDLE = Load(running=10, waiting=0, cache_use=0.3, preemptions=0)
BEHIND = Load(running=10, waiting=90, cache_use=0.9, preemptions=0)
clock = count(1)


def limit() -> InFlightLimit:
    return InFlightLimit(most=1000, least=16)


def observe(limit: InFlightLimit, load: Load, times: int, *, in_flight: int | None = None) -> list[int]:
    values: list[int] = []
    for _ in range(times):
        now = ADJUST_S * next(clock)
        limit.observe({"a": load}, in_flight=limit.value if in_flight is None else in_flight, now=now)
        values.append(limit.value)
    return values


def test_a_growing_queue_lowers_the_limit_to_the_least_and_not_below() -> None:
    lowered = observe(limit(), BEHIND, 40)
    assert lowered == sorted(lowered, reverse=True)
    assert lowered[:2] == [800, 640]
    assert lowered[-1] == 16


def test_it_recovers_to_the_most_when_the_queue_is_gone() -> None:
    held = limit()
    observe(held, BEHIND, 5)
    assert re.fullmatch("90 requests .*10 running.*", held.why or "")
    raised = observe(held, IDLE, 40)
    assert raised == sorted(raised)
    assert raised[-1] == 1000
    assert held.why is None


def test_a_limit_that_is_not_used_does_not_rise() -> None:
    held = limit()
    observe(held, BEHIND, 3)
    value = held.value
    assert set(observe(held, IDLE, 5, in_flight=value // 2)) == {value}


def test_preemptions_lower_it_and_a_restarted_server_does_not() -> None:
    held = limit()
    observe(held, Load(running=9, waiting=0, cache_use=0.5, preemptions=7), 2)
    assert held.value == 1000  # the first look shows a total, not a rise
    observe(held, Load(running=9, waiting=0, cache_use=0.5, preemptions=9), 1)
    assert held.value == 800
    assert re.search("preempted 2 requests", held.why or "")
    observe(held, Load(running=9, waiting=0, cache_use=0.5, preemptions=0), 1)
    assert held.value == 850


def test_a_full_cache_counts_only_with_a_queue() -> None:
    full, queued = limit(), limit()
    observe(full, Load(running=9, waiting=0, cache_use=0.99, preemptions=0), 3)
    observe(queued, Load(running=9, waiting=1, cache_use=0.99, preemptions=0), 1)
    assert (full.value, queued.value) == (1000, 800)


def test_silent_replicas_change_nothing() -> None:
    held = limit()
    observe(held, BEHIND, 2)
    value = held.value
    held.observe({}, in_flight=5, now=ADJUST_S * next(clock))
    assert held.value == value


def test_adjustments_are_apart() -> None:
    held = limit()
    now = ADJUST_S * next(clock)
    for later in (0.0, 1.0, ADJUST_S - 0.1):
        held.observe({"a": BEHIND}, in_flight=held.value, now=now + later)
    assert held.value == 800


@pytest.mark.parametrize("adapts", [True, False])
def test_the_replicas_are_asked_and_the_planner_begins_no_more_than_the_limit(tmp_path: Path, adapts: bool) -> None:
    page = 'vllm:num_requests_waiting{engine="0"} 90\nvllm:num_requests_running{engine="0"} 10\n'

    async def main() -> None:
        with serving(lambda request: Response(status=404)) as server:
            server.metrics = page
            config = RunConfig(
                run_dir=tmp_path,
                engine=Engine(urls=(server.url, "http://127.0.0.1:1")),
                rollouts=Rollouts(adapt_in_flight=adapts),
            )
            ledger = Ledger(tmp_path / "ledger.sqlite")
            replicas = [Replica(url=url) for url in config.engine.urls]
            watch = LoadWatch(config, ledger, replicas)
            watching = asyncio.create_task(watch.run())
            try:
                await wait_until_async(lambda: not adapts or watch.limit.value < watch.limit.most)
                await asyncio.sleep(0)
            finally:
                watching.cancel()
                ledger.close()
            assert watch.status() == ({server.url: {"running": 10, "waiting": 90, "cache_use": 0}} if adapts else {})
        assert watch.limit.value == (watch.limit.least if adapts else 1024)
        assert watch.limit.least == 2 * config.rollouts.group_size
        assert bool(watch.limit.notes()) is adapts

    asyncio.run(main())
