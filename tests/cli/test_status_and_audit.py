"""`penstock status` and `penstock audit`, for people and for scripts."""

import asyncio
import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.terminal import Terminal
from typer.testing import CliRunner

from cli.main import app, main
from orchestrator import run_dir
from orchestrator.ledger.ledger import Ledger
from penstock.config import RunConfig
from penstock.runtime.embedded_redis import EmbeddedRedis

PENSTOCK = str(Path(sys.executable).parent / "penstock")
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def run(server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with eight planned rollouts, which nobody drives."""
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    config = RunConfig(run_dir=tmp_path / "run", redis_url=server.url)
    run_dir.make(config)
    run_dir.enter(config)

    async def plan() -> None:
        ledger = Ledger(config.ledger_path)
        ledger.plan(environment="noop", example=0, size=8)
        await ledger.committed()
        ledger.close()

    asyncio.run(plan())
    return config.run_dir


def printed(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == exit_code, result.output
    return result.stdout


def test_status_in_plain_lines(run: Path, server: EmbeddedRedis) -> None:
    id = run_dir.read(run)["run"]
    *lines, waits_for = printed("status", str(run)).splitlines()
    assert waits_for.startswith("waits for  the orchestrator is not running (it has not come to work yet): `penstock")
    assert lines == [
        f"run        {id} in {run}",
        "state      stopped",
        "rollouts   8 planned = 0 delivered + 0 filtered + 8 in flight + 0 dead",
        "in flight  planned 8",
        f"redis      {server.url} answers",
        "queues     rollouts 0, filtering 0, advantages 0, encoding 0",
        "workers    no job is running",
    ]


def test_status_without_redis_says_so_and_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://:hunter2@127.0.0.1:1/0")
    text = printed("status", str(run))
    assert "redis      Redis at redis://127.0.0.1:1/0 cannot be used" in text
    assert "rollouts   8 planned" in text
    assert "hunter2" not in text


def test_status_as_one_json_object(run: Path) -> None:
    found = json.loads(printed("status", str(run), "--json"))
    assert set(found) == {
        "run", "run_dir", "state", "status_age_s", "phase", "stopped_by", "process", "running_s", "step", "steps",
        "rollouts", "states", "rollouts_per_s", "tokens_per_s", "queued", "workers", "event_loop_lag", "http", "redis",
        "ledger", "waiting_for",
    }  # fmt: skip
    assert found["state"] == "stopped"
    assert found["rollouts"]["in_flight"] == 8


def test_status_on_a_terminal_has_colours_and_the_same_words(run: Path) -> None:
    with Terminal(PENSTOCK, "status", str(run), env={"PYTHONPATH": ROOT, "PATH": "/usr/bin:/bin"}) as terminal:
        assert terminal.wait() == 0
    assert "rollouts    8 planned = 0 delivered + 0 filtered + 8 in flight + 0 dead" in terminal.text
    assert "\x1b[" in terminal.raw
    assert "{" not in terminal.text


def test_audit_in_plain_lines(run: Path) -> None:
    assert printed("audit", str(run)).splitlines() == [
        "planned            8",
        "delivered          0  in 0 steps",
        "filtered           0",
        "in flight          8",
        "dead               0",
        "fenced             0  late answers, not counted",
        "verdict    It adds up: 8 planned = 0 delivered + 0 filtered + 8 in flight + 0 dead.",
    ]


def test_audit_as_one_json_object(run: Path) -> None:
    assert json.loads(printed("audit", str(run), "--json")) == {
        "planned": 8, "delivered": 0, "filtered": {}, "in_flight": 8, "dead": 0, "fenced": 0,
        "balanced": True, "problems": [], "steps": 0, "dead_jobs": [],
    }  # fmt: skip


def test_audit_fails_when_it_does_not_add_up(run: Path) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite", isolation_level=None)) as connection:
        connection.execute("DELETE FROM rollouts WHERE idx = 0")
        connection.execute("UPDATE jobs SET state = 'dead', error = 'no' WHERE id LIKE '%-1'")
    text = printed("audit", str(run), exit_code=1)
    assert "problem    rollout g0000001-1 is open and has no job" in text
    assert "died       1 job of rollout: no" in text
    assert "It does NOT add up: 8 planned = 0 delivered + 0 filtered + 7 in flight + 0 dead; 1 problem." in text
    assert json.loads(printed("audit", str(run), "--json", exit_code=1))["balanced"] is False


@pytest.mark.parametrize("command", ["status", "audit"])
def test_what_is_no_run_is_said_in_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["penstock", command, str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"penstock: {tmp_path} is not a run directory: there is no run.json\n"


def test_a_wrong_address_in_the_environment_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://:hunter2/@h")
    monkeypatch.setattr("sys.argv", ["penstock", "status", str(run)])
    with pytest.raises(SystemExit):
        main()
    error = capsys.readouterr().err
    assert error.startswith("penstock: environment, PENSTOCK_REDIS_URL: is not the address of a Redis")
    assert "hunter2" not in error
