"""Typed rows of a run's state, as the table `state` keeps them."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headpond.ledger import queries
from headpond.ledger.schema import STATEMENTS, open_for_writing
from headpond.ledger.state_rows import RunState


@pytest.fixture
def connection(tmp_path: Path) -> sqlite3.Connection:
    return open_for_writing(tmp_path / "ledger.sqlite")


def write(connection: sqlite3.Connection, state: RunState) -> int:
    written, deleted = state.take_changes()
    connection.executemany(STATEMENTS["state"], written)
    connection.executemany(STATEMENTS["forgotten_state"], deleted)
    return len(written) + len(deleted)


def test_a_change_of_an_attribute_writes_one_row(connection: sqlite3.Connection) -> None:
    state = RunState()
    assert write(connection, state) == 0
    state.sequence += 1
    state.environments["maths"].examples = 10
    for slot in range(100):
        state.environments["maths"].ended_groups[slot].example = slot
    assert write(connection, state) == 102
    state.environments["maths"].ended_groups[7].dropped = "stale"
    assert write(connection, state) == 1
    state.stages["play"].settle(2.0)
    state.stages["play"].settle(1.0)
    assert write(connection, state) == 1
    read = queries.whole_state(connection)
    assert read == state
    assert read.environments == state.environments
    assert read.environments["maths"].ended_groups == state.environments["maths"].ended_groups
    assert (read.stages["play"].settled, read.stages["play"].longest_s) == (2, 2.0)
    assert write(connection, read) == 0
    connection.close()


def test_rows_that_are_only_read_are_not_written(connection: sqlite3.Connection) -> None:
    state = RunState()
    assert state.environments["maths"].examples is None
    assert 3 not in state.environments["maths"].quarantined
    assert write(connection, state) == 0
    connection.close()


def test_deleted_rows_are_gone_and_others_keep_the_order_of_writing(connection: sqlite3.Connection) -> None:
    state = RunState()
    for example in (5, 3, 9):
        state.environments["maths"].again[example].touch()
    write(connection, state)
    state.environments["maths"].again.forget(3)
    write(connection, state)
    state.environments["maths"].again[3].touch()
    write(connection, state)
    assert list(queries.run_state(connection, "again").environments["maths"].again) == [5, 9, 3]
    assert not queries.run_state(connection).environments
    connection.close()


def test_a_row_of_an_earlier_release_gets_the_defaults_of_new_attributes(tmp_path: Path) -> None:
    with closing(open_for_writing(tmp_path / "ledger.sqlite")) as connection:
        connection.execute(STATEMENTS["state"], ("run", "", 0, '{"steps_delivered": 4, "forgotten": 1}'))
        state = queries.run_state(connection)
        assert (state.steps_delivered, state.fenced) == (4, 0)
        assert '"forgotten"' not in state.content()
