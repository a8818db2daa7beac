import asyncio
import dataclasses
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from headpond.broker import redis_keys
from headpond.config import RunConfig
from headpond.errors import RunError
from headpond.event_loop.lag_summaries import LAG_KEY, LagSummary
from headpond.inspection import run_json
from headpond.inspection.status import status
from headpond.orchestrator import run_dir
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.lock import lock_directory
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.records.status import Process

HERE = socket.gethostname()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), password="hunter2") as server:
        yield server


@pytest.fixture
def client(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client
        client.flushall()


@pytest.fixture
def run(server: EmbeddedRedis, tmp_path: Path) -> Path:
    """A run with two planned rollouts in its ledger, without an orchestrator."""
    config = RunConfig(run_dir=tmp_path / "run", redis_url=server.url)
    run_dir.create_directories(config)
    run_dir.begin_or_resume(config)

    async def plan() -> None:
        ledger = Ledger(config.ledger_path)
        ledger.plan(environment="noop", example=0, size=2)
        ledger.state.steps_delivered = 3
        await ledger.committed()
        ledger.close()

    asyncio.run(plan())
    return config.run_dir


def write_status(run: Path, *, age_s: float = 0.0, host: str = HERE, **values: Any) -> None:
    """status.json as an orchestrator last wrote it."""
    values_written = {
        "run": run_json.read(run)["run"], "phase": "running", "stopped_by": None, "at": time.time() - age_s,
        "process": {"host": host, "pid": 4711}, "running_s": 60.0, "step": 2, "steps": 9, "rollouts_per_s": 7.5,
        "rollouts": {"planned": 1}, "states": {}, "waiting_for": ["the engine cannot be reached"],
        "event_loop_lag": {"p99_s": 0.5},
    }  # fmt: skip
    run_dir.write_json(run / "status.json", values_written | values)


def lock_in_redis(client: redis.Redis, run: str) -> None:
    client.set(redis_keys.LOCK, json.dumps({"run": run, "run_dir": "/runs/other", "host": "elsewhere", "pid": 1}))


def test_a_running_run_is_reported_by_its_own_status(run: Path, server: EmbeddedRedis) -> None:
    write_status(run)
    with lock_directory(run):
        result = status(run, server.url)
    assert result.state == "running"
    assert result.process == Process(host=HERE, pid=4711)
    assert result.waiting_for == ["the engine cannot be reached"]
    assert (result.steps, result.rollouts_per_s) == (9, 7.5)
    assert result.status_age_s < 10
    assert result.event_loop_lag == {"orchestrator": {"p99_s": 0.5}}


def test_counts_come_from_the_ledger(run: Path, server: EmbeddedRedis) -> None:
    write_status(run)
    result = status(run, server.url)
    assert result.step == 3
    assert result.rollouts["planned"] == result.rollouts["in_flight"] == 2
    assert result.states == {"planned": 2}


def test_without_the_ledger_the_last_counts_are_shown(run: Path, server: EmbeddedRedis) -> None:
    write_status(run)
    (run / "ledger.sqlite").unlink()
    result = status(run, server.url)
    assert result.rollouts == {"planned": 1}
    assert "there is no ledger" in result.ledger["error"]


def test_a_lock_without_a_status_is_a_starting_run(run: Path, server: EmbeddedRedis) -> None:
    with lock_directory(run):
        result = status(run, server.url)
    assert result.state == "starting"
    assert result.status_age_s is None


def test_a_lock_with_an_old_status_is_a_silent_run(run: Path, server: EmbeddedRedis) -> None:
    write_status(run, age_s=60)
    with lock_directory(run):
        result = status(run, server.url)
    assert result.state == "silent"
    assert "written no status for 60 s" in result.waiting_for[0]


@pytest.mark.parametrize(
    ("last", "why", "kept"),
    [
        ({}, "its process has died", "nothing is lost"),
        ({"phase": "draining"}, "it was stopped", "nothing is lost"),
        ({"stopped_by": "32 rollouts died"}, "32 rollouts died", "open rollouts are kept"),
    ],
)
def test_the_reason_of_a_stopped_run_is_reported(
    run: Path, server: EmbeddedRedis, last: dict[str, Any], why: str, kept: str
) -> None:
    write_status(run, **last)
    result = status(run, server.url)
    assert result.state == "stopped"
    assert result.rollouts_per_s == 0
    assert result.waiting_for == [f"the orchestrator is not running ({why}): {kept}, `headpond run` resumes the run"]


def test_a_run_that_is_done_waits_for_nothing_even_without_redis(run: Path) -> None:
    write_status(run, phase="done")
    result = status(run, "redis://127.0.0.1:1/0")
    assert result.state == "done"
    assert result.waiting_for == []
    assert result.queued == {}
    assert "127.0.0.1:1/0 cannot be used" in result.redis["error"]


@pytest.mark.parametrize(("holder", "state"), [("ours", "running"), (None, "stopped")])
def test_the_lock_in_redis_decides_for_another_host(
    run: Path, server: EmbeddedRedis, client: redis.Redis, holder: str | None, state: str
) -> None:
    write_status(run, host="elsewhere")
    if holder:
        lock_in_redis(client, run_json.read(run)["run"])
    assert status(run, server.url).state == state


def test_a_full_disk_is_reported_for_a_stopped_run(
    run: Path, server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("full" in cause for cause in status(run, server.url).waiting_for)
    monkeypatch.setattr("headpond.inspection.status.FULL_BYTES", 1 << 62)
    assert any(f"{run}/ledger.sqlite is full" in cause for cause in status(run, server.url).waiting_for)


def test_queues_workers_and_the_lag_of_every_loop(run: Path, server: EmbeddedRedis, client: redis.Redis) -> None:
    id = run_json.read(run)["run"]
    client.lpush("rollouts", "a", "b")
    client.hset(
        redis_keys.LEASES, mapping={f"{id}.g1-0.1.x": "host-1:7", f"{id}.g1-1.2.y": "host-1:7", "other.j.1.z": "w:1"}
    )
    names = {field.name for field in dataclasses.fields(LagSummary)} - {"process", "samples"}
    summary = LagSummary(process="rollouts@host-1", samples=4, **dict.fromkeys(names, 0.25))
    client.set(LAG_KEY.format(process=summary.process), json.dumps(summary.as_dict()))
    result = status(run, server.url)
    assert result.queued == {"rollouts": 2, "filtering": 0, "advantages": 0, "encoding": 0}
    assert result.workers == {"host-1": ["g1-0", "g1-1"]}
    assert result.event_loop_lag["rollouts@host-1"]["p99_s"] == 0.25


def test_a_redis_of_another_run_is_reported(run: Path, server: EmbeddedRedis, client: redis.Redis) -> None:
    lock_in_redis(client, "other")
    client.lpush("rollouts", "theirs")
    result = status(run, server.url)
    assert result.queued == {}
    assert result.redis["error"].endswith("serves another run: the one in /runs/other")


def test_a_missing_password_is_reported_and_none_is_shown(run: Path, server: EmbeddedRedis) -> None:
    result = status(run)
    assert "requires a password: set it in the environment" in result.redis["error"]
    assert "hunter2" not in status(run, server.url).model_dump_json()


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run directory"):
        status(tmp_path)


@pytest.mark.parametrize(
    ("content", "where"), [('{"run": "r", "at": 1.0, "step": "many"}', "step: "), ("[]", "object")]
)
def test_a_status_of_another_shape_is_named_and_raises_nothing(run: Path, content: str, where: str) -> None:
    (run / "status.json").write_text(content)
    result = status(run)
    (note,) = result.notes
    assert re.search(rf"status\.json is damaged, or of another release .*{where}", note)
    assert (result.state, result.step) == ("stopped", 3)
    assert "it was stopped" in result.waiting_for[0]


def test_keys_that_an_older_release_did_not_write_have_their_defaults(run: Path) -> None:
    (run / "status.json").write_text('{"run": "r", "at": 1.0, "phase": "done", "older": 1}')
    result = status(run)
    assert (result.state, result.notes, result.next_step) == ("done", [], {})
