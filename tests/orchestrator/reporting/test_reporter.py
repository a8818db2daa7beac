import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.ledgers import configured, planned

from headpond.broker.queues import Queue
from headpond.event_loop.loop_lag import LoopLag
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.reconciler import Running, Snapshot
from headpond.orchestrator.reporting import reporter as module
from headpond.orchestrator.reporting.metrics import LagPoller, Metrics
from headpond.orchestrator.reporting.prometheus import RunCollector
from headpond.orchestrator.reporting.reporter import Reporter, Sources


def sources(
    ledger: Ledger,
    run_dir: Path,
    snapshot: Snapshot | None = None,
    *troubles: str | None,
    running: Running = Running(),  # noqa: B008  it is not changed
) -> Sources:
    broker = Broker("redis://127.0.0.1:1/0")
    return Sources(
        config=configured(run_dir=run_dir),
        run="run",
        http_url="http://127.0.0.1:1",
        ledger=ledger,
        broker=broker,
        lag=LoopLag(process="orchestrator"),
        lags=LagPoller(broker, own="orchestrator"),
        phase=lambda: "running",
        snapshot=lambda: snapshot or Snapshot(leases={}, depths={}, oldest={}),
        running=lambda: running,
        excluded=dict,
        replicas=dict,
        troubles=lambda: troubles,
        notes=lambda: ["the store keeps much"],
    )


def test_a_status_is_read_from_its_sources(ledger: Ledger, tmp_path: Path) -> None:
    planned(ledger)
    depths = dict.fromkeys(Queue, 0) | {Queue.ROLLOUTS: 3}
    snapshot = Snapshot(leases={}, depths=depths, oldest=dict.fromkeys(Queue))
    running = Running(by_worker=Counter({"host-7": 1}))
    statuses: list[dict[str, Any]] = []
    given = sources(ledger, tmp_path, snapshot, None, "Redis does not answer", running=running)
    reporter = Reporter(given, statuses.append)
    asyncio.run(reporter.write())
    written = json.loads((tmp_path / "status.json").read_text())
    assert written == statuses[0] == reporter.latest_status()
    assert (written["run"], written["phase"], written["steps"]) == ("run", "running", 3)
    assert written["rollouts"]["in_flight"] == written["states"]["planned"] == 4
    assert written["waiting_jobs"]["rollouts"] == 4
    assert written["queued"]["rollouts"] == 3
    assert written["running_by_worker"] == {"host-7": 1}
    assert written["waiting_for"] == ["Redis does not answer"]


def test_a_queue_from_which_nothing_is_taken_is_reported(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNATTENDED_S", -1.0)
    snapshot = Snapshot(leases={}, depths={Queue.FILTERING: 1}, oldest={Queue.FILTERING: 5})
    given = sources(ledger, tmp_path, snapshot)
    reporter = Reporter(given)
    reporter._watch_queues()  # pyright: ignore[reportPrivateUsage]
    (trouble,) = reporter.waiting_for()
    assert "queue filtering" in trouble
    assert trouble.endswith("celery -A headpond.workers.compute worker -Q filtering,advantages,encoding -c 4")
    given.broker.trouble = "Redis does not answer"
    assert reporter.waiting_for() == [], "without Redis the queues cannot be read"


def test_a_queue_whose_workers_are_busy_with_another_is_not_reported(ledger: Ledger, tmp_path: Path) -> None:
    """One process serves the three compute queues, and it encodes."""
    snapshot = Snapshot(leases={}, depths={Queue.FILTERING: 1}, oldest={Queue.FILTERING: 5})
    reporter = Reporter(sources(ledger, tmp_path, snapshot, running=Running(queues={Queue.ENCODING})))
    moved_at = reporter._moved_at  # pyright: ignore[reportPrivateUsage]
    for _ in range(2):
        reporter._watch_queues()  # pyright: ignore[reportPrivateUsage]
        assert reporter.waiting_for() == []
        moved_at[Queue.FILTERING] -= 10 * module.UNATTENDED_S


def test_a_status_that_cannot_be_written_is_reported(ledger: Ledger, tmp_path: Path) -> None:
    given = sources(ledger, tmp_path)
    reporter = Reporter(replace(given, config=configured(run_dir=tmp_path / "missing")))
    asyncio.run(reporter.write())
    [trouble] = reporter.waiting_for()
    assert re.search(r"status\.json .*No such file or directory.*free space", trouble)
    assert reporter.latest_status()["run"] == "run"


class HeldFirst:
    """A function whose first call waits until `release` is called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._began, self._go = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self._began.is_set():
            self._began.set()
            self._go.wait()
        return self._function(*args, **options)

    async def end_with(self, duty: Coroutine[Any, Any, None], last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel `duty` in its first call, wait for it as a TaskGroup does, then await `last`."""
        cancelled = asyncio.create_task(duty)
        await asyncio.to_thread(self._began.wait)
        cancelled.cancel()
        threading.Timer(0.2, self._go.set).start()
        await asyncio.wait([cancelled])
        await last()
        await asyncio.get_running_loop().shutdown_default_executor()  # also what was left behind


def test_the_last_status_is_not_overwritten_by_a_slow_earlier_one(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Reporter(sources(ledger, tmp_path))
    held = HeldFirst(module.run_dir.write_json)
    monkeypatch.setattr(module.run_dir, "write_json", held)
    asyncio.run(held.end_with(reporter.write(), lambda: reporter.write(stopped_by="an error")))
    assert json.loads((tmp_path / "status.json").read_text())["stopped_by"] == "an error"


def test_series_are_read_from_status_ledger_and_lag(ledger: Ledger, tmp_path: Path) -> None:
    planned(ledger)
    given = sources(ledger, tmp_path)
    metrics = Metrics(given.config, ledger, given.lag, given.lags)
    registry = CollectorRegistry()
    collector = RunCollector(
        steps=3, status=Reporter(given).latest_status, ledger=ledger, metrics=metrics, lag=given.lag, lags=given.lags
    )
    registry.register(collector)
    text = generate_latest(registry).decode()
    assert 'headpond_rollouts{state="planned"} 4.0' in text
    assert "headpond_steps_wanted 3.0" in text
    assert 'headpond_event_loop_blocked_seconds{process="orchestrator"} 0.0' in text
