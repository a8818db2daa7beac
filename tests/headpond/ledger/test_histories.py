import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.run_dirs import make_run

from headpond.ledger import histories, schema
from headpond.ledger.archive import archive
from headpond.ledger.schema import STATEMENTS, open_for_writing

JOB = ("g0000001-0", "rollout", "g0000001", 2, 7, "settled", 1, 0, "the worker's disk is full", None)


@pytest.fixture(params=["hot", "archived"])
def connection(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[sqlite3.Connection]:
    path = make_run(tmp_path / "run", archived=False).path / "ledger.sqlite"
    ledger = open_for_writing(path)
    ledger.execute(STATEMENTS["jobs"], JOB)
    if request.param == "archived":
        ledger.execute("BEGIN")
        archive(ledger, at_most=1000, now=101.0)
        ledger.execute("COMMIT")
    ledger.close()
    with schema.reading(path) as connection:
        yield connection


def test_a_rollout_has_its_state_result_job_and_events(connection: sqlite3.Connection) -> None:
    found = histories.rollout(connection, "g0000001-0")
    assert found is not None
    assert (found["state"], found["step"], found["environment"], found["example"]) == ("trained", 0, "sums", 7)
    assert found["result"]["completion_tokens"] == 18
    assert found["job"] == {
        "job": "g0000001-0", "kind": "rollout", "state": "settled", "attempt": 2, "failures": 1, "losses": 0,
        "error": "the worker's disk is full",
    }  # fmt: skip
    assert [event["action"] for event in found["events"]] == ["lost"]


def test_a_dead_rollout_has_its_error(connection: sqlite3.Connection) -> None:
    found = histories.rollout(connection, "g0001001-1")
    assert found is not None
    assert (found["state"], found["error"], found["result"]) == ("dead", "boom", None)
    dead = histories.dead_rollouts(connection)
    assert sorted(each["rollout"] for each in dead) == ["g0001001-0", "g0001001-1", "g0001001-2"]


def test_the_archive_has_the_numbers_of_a_rollout_whose_history_is_deleted(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run").path / "ledger.sqlite"
    ledger = open_for_writing(path)
    ledger.execute("DELETE FROM histories")
    ledger.execute("UPDATE closed_rollouts SET policy_failed = 1 WHERE grp = 1 AND idx = 1")
    ledger.close()
    with schema.reading(path) as connection:
        found = [histories.rollout(connection, f"g0000001-{index}") for index in range(2)]
        dead = histories.rollout(connection, "g0001001-1")
    results = [each["result"] for each in found if each]
    assert [(each["reward"] is None, each["completion_tokens"]) for each in results] == [(False, 18), (False, 19)]
    assert [each["policy_error"] for each in results] == [None, histories.LOST_POLICY_ERROR]
    assert dead is not None
    assert (dead["state"], dead["result"]) == ("dead", None)


def test_a_rollout_or_a_step_that_does_not_exist_is_none(connection: sqlite3.Connection) -> None:
    assert histories.rollout(connection, "g0009999-0") is None
    assert histories.step(connection, 99) is None


def test_a_step_has_its_state_and_its_rollouts(connection: sqlite3.Connection) -> None:
    found = histories.step(connection, 0)
    assert found is not None
    assert (found["state"], found["rollouts"]) == ("trained", 3)
