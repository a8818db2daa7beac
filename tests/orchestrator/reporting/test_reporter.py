import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.ledgers import configured, planned

from headpond.broker.queues import Queue
from headpond.event_loop.loop_lag import LoopLag
from headpond.orchestrator.components import PROCESS, Components
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.lock import RunLock
from headpond.orchestrator.reconciler import Running, Snapshot
from headpond.orchestrator.reporting import reporter as module
from headpond.orchestrator.reporting.prometheus import RunCollector
from headpond.orchestrator.reporting.reporter import StatusCallback, ignore_status
from headpond.orchestrator.shutdown import StopRequests
from headpond.records.status import Status


def components(ledger: Ledger, run_dir: Path, on_status: StatusCallback = ignore_status) -> Components:
    troubles, config = Troubles(), configured(run_dir=run_dir)
    broker = Broker("redis://127.0.0.1:1/0", troubles)
    lock, lag = RunLock(run_dir, broker, run="run", epoch=1), LoopLag(process=PROCESS)
    return Components(
        config, run="run", ledger=ledger, broker=broker, lock=lock, lag=lag, stop=StopRequests(), on_status=on_status,
        troubles=troubles, http_url="http://127.0.0.1:1",
    )  # fmt: skip


def test_a_status_is_read_from_the_components(ledger: Ledger, tmp_path: Path) -> None:
    planned(ledger)
    statuses: list[Status] = []
    run = components(ledger, tmp_path, statuses.append)
    depths = dict.fromkeys(Queue, 0) | {Queue.ROLLOUTS: 3}
    run.reconciler.latest = Snapshot(leases={}, depths=depths, oldest=dict.fromkeys(Queue))
    run.reconciler.running = Running(by_worker=Counter({"host-7": 1}))
    run.broker.trouble.text = "Redis does not answer"
    asyncio.run(run.reporter.write())
    written = json.loads((tmp_path / "status.json").read_text())
    assert Status.model_validate(written) == statuses[0] == run.reporter.latest_status()
    assert (written["run"], written["phase"], written["steps"]) == ("run", "running", 3)
    assert written["rollouts"]["in_flight"] == written["states"]["planned"] == 4
    assert written["waiting_jobs"]["rollouts"] == 4
    assert written["queued"]["rollouts"] == 3
    assert written["running_by_worker"] == {"host-7": 1}
    assert written["waiting_for"] == ["Redis does not answer"]
    assert written.keys() == Status.model_fields.keys()


def test_a_queue_from_which_nothing_is_taken_is_reported(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNATTENDED_S", -1.0)
    run = components(ledger, tmp_path)
    run.reconciler.latest = Snapshot(leases={}, depths={Queue.FILTERING: 1}, oldest={Queue.FILTERING: 5})
    run.reporter._watch_queues()  # pyright: ignore[reportPrivateUsage]
    (trouble,) = run.troubles.texts()
    assert "queue filtering" in trouble
    assert trouble.endswith("celery -A headpond.workers.compute worker -Q filtering,advantages,encoding -c 4")
    run.broker.trouble.text = "Redis does not answer"
    assert run.troubles.texts() == ["Redis does not answer"], "without Redis the queues cannot be read"


def test_a_queue_whose_workers_are_busy_with_another_is_not_reported(ledger: Ledger, tmp_path: Path) -> None:
    """One process serves the three compute queues, and it encodes."""
    run = components(ledger, tmp_path)
    run.reconciler.latest = Snapshot(leases={}, depths={Queue.FILTERING: 1}, oldest={Queue.FILTERING: 5})
    run.reconciler.running = Running(queues={Queue.ENCODING})
    moved_at = run.reporter._moved_at  # pyright: ignore[reportPrivateUsage]
    for _ in range(2):
        run.reporter._watch_queues()  # pyright: ignore[reportPrivateUsage]
        assert run.troubles.texts() == []
        moved_at[Queue.FILTERING] -= 10 * module.UNATTENDED_S


def test_a_status_that_cannot_be_written_is_reported(ledger: Ledger, tmp_path: Path) -> None:
    run = components(ledger, tmp_path / "missing")
    asyncio.run(run.reporter.write())
    [trouble] = run.troubles.texts()
    assert re.search(r"status\.json .*No such file or directory.*free space", trouble)
    assert run.reporter.latest_status().run == "run"


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
    reporter = components(ledger, tmp_path).reporter
    held = HeldFirst(module.run_dir.write_json)
    monkeypatch.setattr(module.run_dir, "write_json", held)
    asyncio.run(held.end_with(reporter.write(), lambda: reporter.write(stopped_by="an error")))
    assert json.loads((tmp_path / "status.json").read_text())["stopped_by"] == "an error"


def test_series_are_read_from_status_ledger_and_lag(ledger: Ledger, tmp_path: Path) -> None:
    planned(ledger)
    registry = CollectorRegistry()
    registry.register(RunCollector(components(ledger, tmp_path)))
    text = generate_latest(registry).decode()
    assert 'headpond_rollouts{state="planned"} 4.0' in text
    assert "headpond_steps_wanted 3.0" in text
    assert 'headpond_event_loop_blocked_seconds{process="orchestrator"} 0.0' in text
