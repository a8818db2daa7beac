import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.ledger import queries
from penstock.ledger.schema import STATEMENTS, open_for_writing
from penstock.ledger.states import RolloutState


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Step 0 of two rollouts, delivered; a third one was filtered, a fourth one is planned."""
    connection = open_for_writing(tmp_path / "ledger.sqlite")
    rollouts = [
        (
            "g1",
            0,
            "delivered",
            None,
            0,
            0.5,
            '{"columns": {"key": "c0"}, "experts": {"key": "e0", "size": 7}}',
            0,
            None,
        ),
        ("g1", 1, "trained", None, 0, -0.5, '{"columns": {"key": "c1"}, "experts": null}', 0, None),
        ("g2", 0, "filtered", "stale", None, None, '{"columns": null, "experts": {"key": "e2", "size": 5}}', 0, None),
        ("g3", 0, "planned", None, None, None, None, 0, None),
    ]
    connection.executemany(STATEMENTS["rollouts"], rollouts)
    connection.executemany(STATEMENTS["batches"], [(0, 1, "delivered"), (1, 1, "composed")])
    connection.executemany(STATEMENTS["meta"], [("rollouts_planned", 4), ("steps_delivered", 1)])
    connection.executemany(STATEMENTS["events"], [(1.0, "j", "lost", ""), (3.0, "j", "lost", ""), (4.0, "j", "x", "")])
    yield connection
    connection.close()


def test_rollouts_are_counted_by_state_and_by_reason(connection: sqlite3.Connection) -> None:
    progress = queries.progress(connection)
    assert progress["step"] == 1
    assert progress["states"] == {"planned": 1, "filtered": 1, "delivered": 1, "trained": 1}
    assert progress["rollouts"] == {
        "planned": 4, "delivered": 2, "filtered": {"stale": 1}, "in_flight": 1, "dead": 0, "fenced": 0,
        "balanced": True,
    }  # fmt: skip


def test_a_rollout_too_few_is_not_balanced() -> None:
    states = Counter({RolloutState.DELIVERED: 2, RolloutState.DEAD: 1})
    assert queries.balance(3, states, Counter(), 0)["balanced"]
    assert not queries.balance(4, states, Counter(), 0)["balanced"]


def test_released_experts_have_no_key(connection: sqlite3.Connection) -> None:
    assert queries.delivered_files(connection, columns_from=0, experts_from=0) == [
        ("g1-0", "c0", "e0"),
        ("g1-1", "c1", None),
    ]
    assert queries.delivered_files(connection, columns_from=0, experts_from=1)[0] == ("g1-0", "c0", None)
    assert queries.delivered_files(connection, columns_from=1, experts_from=1) == []


def test_bytes_of_experts_include_filtered_rollouts(connection: sqlite3.Connection) -> None:
    assert queries.routed_experts_bytes(connection) == 12


def test_deliveries_include_trained_rollouts(connection: sqlite3.Connection) -> None:
    assert list(queries.delivered_rollouts(connection)) == [(0, "g1-0"), (0, "g1-1")]
    assert list(queries.delivered_rollouts(connection, from_step=1)) == []
    assert [queries.step_of(connection, rollout) for rollout in ("g1-1", "g2-0", "g9-0")] == [0, None, None]
    assert queries.delivered_steps(connection) == {0}
    assert queries.untrained_steps(connection) == {0: 1}


def test_the_last_event_of_an_action_is_found(connection: sqlite3.Connection) -> None:
    assert queries.last_event_at(connection, "lost") == 3.0
    assert queries.last_event_at(connection, "never") is None


def test_a_snapshot_does_not_see_later_commits(connection: sqlite3.Connection, tmp_path: Path) -> None:
    reader = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    with queries.snapshot(reader):
        before = queries.meta(reader)
        connection.execute(STATEMENTS["meta"], ("steps_delivered", 2))
        assert queries.meta(reader) == before
    assert queries.meta(reader)["steps_delivered"] == 2
    reader.close()
