"""A ledger of schema 1 is read as it is, and upgraded with everything that it holds.

The vector was written by the last version of that schema: three delivered steps, two of them trained, a dropped group,
a group that died, and open groups in every stage with a composed step.
"""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headpond.errors import LedgerError
from headpond.ledger import queries, schema
from headpond.ledger.states import JobState
from headpond.orchestrator.ledger import restore, upgrade
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.upgrade import upgrade_ledger

VECTOR = Path(__file__).parents[2] / "vectors" / "ledger_of_schema_1.sql"
RUN = "5f2a90c1d3e4"
KILLED = """
import os, sys
from pathlib import Path
from headpond.orchestrator.ledger import upgrade
upgrade.AT_ONCE, done = 2, []
copy = upgrade.copy_closing
def copy_then_die(*arguments, **values):
    copy(*arguments, **values)
    done.append(1)
    if len(done) == 2:
        os.kill(os.getpid(), 9)
upgrade.copy_closing = copy_then_die
upgrade.upgrade_ledger(Path(sys.argv[1]), keep_events_steps=50)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA journal_mode = WAL;" + VECTOR.read_text())
    return path


def upgraded(path: Path, keep_events_steps: int = 50) -> None:
    upgrade_ledger(path, keep_events_steps=keep_events_steps)


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return schema.version_of(connection)


def shown(path: Path) -> dict[str, Any]:
    """What every reader of a ledger reads."""
    restored = restore.read(path)
    with schema.reading(path) as connection:
        groups = [f"g{ordinal:07d}" for ordinal in range(12)]
        return {
            "progress": queries.progress(connection),
            "counted": queries.counted(connection),
            "meta": queries.meta(connection),
            "dead": queries.dead_jobs(connection, limit=9),
            "problems": list(queries.structure_problems(connection, limit=9)),
            "delivered": sorted(queries.delivered_rollouts(connection)),
            "steps": queries.delivered_steps(connection),
            "files": sorted(queries.delivered_files(connection, RUN, groups)),
            "rollouts": sorted(connection.execute("SELECT * FROM all_rollouts")),
            "lost": queries.last_event_at(connection, "dead"),
            "open": {
                id: (group.state, [(r.state, r.step, r.result, r.advantage) for r in group.rollouts])
                for id, group in restored.groups.items()
            },
            "jobs": {id: job.row() for id, job in restored.jobs.items()},
            "batches": {step: batch.advantages for step, batch in restored.batches.items()},
            "untrained": restored.untrained,
            "deaths": restored.deaths,
        }


def test_an_old_ledger_is_read_as_it_is_and_upgraded_without_a_loss(path: Path) -> None:
    before = shown(path)
    assert before["progress"]["rollouts"] == {
        "planned": 40, "delivered": 11, "filtered": {"cancelled": 1, "gibberish": 1, "zero_variance": 4},
        "in_flight": 20, "dead": 3, "fenced": 1, "balanced": True,
    }  # fmt: skip
    assert before["dead"] == [{"kind": "rollout", "error": "the engine answered 500", "jobs": 3}]
    assert (len(before["open"]), before["problems"], before["untrained"]) == (5, [], {2: 4})
    assert version(path) == 1, "reading changes nothing"
    upgraded(path)
    assert version(path) == 2
    assert shown(path) == before
    with schema.reading(path) as connection:
        assert connection.execute("SELECT count(*) FROM histories").fetchone() == (3,), "of the last steps"
        assert connection.execute("SELECT count(*) FROM jobs").fetchone()[0] < 30, "of open groups and steps"


def test_an_upgraded_ledger_is_continued(path: Path) -> None:
    upgraded(path)
    ledger = Ledger(path)
    assert ledger.number("groups_planned") == 10
    assert {job.state for job in ledger.jobs.values()} == {JobState.WAITING, JobState.SUBMITTED, JobState.SETTLED}
    ledger.close()
    content = path.read_bytes()
    upgraded(path)
    assert path.read_bytes() == content, "an upgraded ledger is left alone"


def test_an_upgrade_that_is_killed_leaves_the_old_ledger_and_begins_again(path: Path) -> None:
    before = shown(path)
    command = [sys.executable, "-c", KILLED, str(path)]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(Path.cwd())}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert version(path) == 1
    assert shown(path) == before
    assert len(list(path.parent.iterdir())) > 1, "the unfinished one"
    upgraded(path)
    assert shown(path) == before
    assert [file.name for file in path.parent.iterdir()] == ["ledger.sqlite"]


def test_what_a_killed_orchestrator_left_in_the_write_ahead_log_is_upgraded(path: Path, tmp_path: Path) -> None:
    copied = tmp_path / "killed" / "ledger.sqlite"
    copied.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("INSERT INTO meta VALUES ('late', 7)")
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{copied}{suffix}")
    upgraded(copied)
    with schema.reading(copied) as connection:
        assert queries.meta(connection)["late"] == 7


def test_histories_are_kept_as_long_as_the_setting_says(path: Path) -> None:
    upgraded(path, keep_events_steps=1)
    with schema.reading(path) as connection:
        assert connection.execute("SELECT grp, step FROM histories").fetchall() == [(3, 2)]


def test_a_long_upgrade_reports_its_progress(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upgrade, "AT_ONCE", 2)
    monkeypatch.setattr(upgrade, "REPORTED_EVERY_S", -1.0)
    with caplog.at_level("INFO", logger="headpond.ledger"):
        upgraded(path)
    told = [record.getMessage() for record in caplog.records]
    assert told[:3] == [f"action=ledger_upgrading groups={done} of=5" for done in (2, 4, 5)]
    assert told[3].startswith(f"action=ledger_upgraded path={path} groups=5 ")


def test_an_old_ledger_is_not_written_before_it_is_upgraded(path: Path) -> None:
    before = shown(path)
    with pytest.raises(LedgerError, match="is of an earlier release: `headpond run` upgrades it"):
        Ledger(path)
    assert shown(path) == before


def test_a_first_start_that_an_earlier_release_did_not_finish_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE rollouts (grp TEXT)")
    Ledger(path).close()
    assert version(path) == 2
    foreign = tmp_path / "foreign.sqlite"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.executescript("CREATE TABLE meta (key TEXT); INSERT INTO meta VALUES ('mine')")
    before = foreign.read_bytes()
    with pytest.raises(LedgerError, match="it has no version, but rows in meta"):
        schema.open_for_writing(foreign)
    assert foreign.read_bytes() == before
