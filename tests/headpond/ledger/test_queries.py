import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headpond.ids import RolloutId, execution_of
from headpond.ledger import queries
from headpond.ledger.archive import archive, execution_code
from headpond.ledger.schema import STATEMENTS, open_for_writing
from headpond.ledger.state_rows import RunState
from headpond.ledger.states import RolloutState

RUN = "0123456789ab"
DIRECTORY = f"rollouts/{RUN}"
Row = tuple[Any, ...]


def rollout(
    id: str, state: str, *, reason: str | None = None, step: int | None = None, result: str | None = None
) -> Row:
    group, index = RolloutId.parse(id)
    named = execution_of(json.loads(result)["columns"]["key"]) if result else None
    attempt, execution = (named[0], execution_code(named[1])) if named else (None, None)
    return (group, index, state, reason, step, 0.5, result, 0, None, attempt, execution, 1.5, 0.25)


def result(*keys: str) -> str:
    """The columns' key, and that of the experts."""
    files = {kind: {"key": key} for kind, key in zip(("columns", "experts"), keys, strict=False)}
    return json.dumps({"reward": 0.25, "sample_lengths": [3, 4]} | files)


FILES = [f"{DIRECTORY}/g0000001-0/2.00000000beef/{name}.safetensors" for name in ("columns", "experts")]
ROLLOUTS = [
    rollout("g0000001-0", "delivered", step=0, result=result(*FILES)),
    rollout("g0000001-1", "delivered", step=0, result=result(f"{DIRECTORY}/g0000001-1/1.other/own")),
    rollout("g0000002-0", "delivered", step=1, result=result(f"{DIRECTORY}/g0000002-0/1.aa/own")),
    rollout("g0000002-1", "filtered", reason="stale", result=result("gone")),
    rollout("g0000003-0", "planned"),
]
GROUPS = [(f"g000000{n}", n, "noop", 7, state, "training") for n, state in ((1, "closed"), (2, "closed"), (3, "play"))]


@pytest.fixture(params=["hot", "archived"])
def connection(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[sqlite3.Connection]:
    """Step 0 of two rollouts is trained, step 1 of one is delivered; a fourth was filtered, a fifth is planned."""
    connection = open_for_writing(tmp_path / "ledger.sqlite")
    connection.executemany(STATEMENTS["rollouts"], ROLLOUTS)
    connection.executemany(STATEMENTS["groups"], GROUPS)
    batches = [(0, 1, "trained", 2), (1, 1, "delivered", 1), (2, 1, "composed", 0)]
    connection.executemany(STATEMENTS["batches"], [(*batch, None, None, None) for batch in batches])
    state = RunState(rollouts_planned=5, steps_delivered=2)
    state.touch()
    states = {"planned": 1, "filtered": 1, "delivered": 1, "trained": 2, "dead": 0}
    state.rollout_counts["states"].by_name = Counter(states)
    state.rollout_counts["reasons"].by_name = Counter(stale=1)
    state.dead_jobs["filter"].by_name = Counter(no=2)
    state.dead_jobs["rollout"].by_name = Counter({"": 5})
    connection.executemany(STATEMENTS["state"], state.take_changes()[0])
    events = [(1.0, 0, "j", "lost", ""), (3.0, 0, "j", "lost", ""), (4.0, 1, "j", "x", "")]
    connection.executemany(STATEMENTS["events"], events)
    if request.param == "archived":
        assert archive(connection, at_most=9, now=9.0) == 2
    yield connection
    connection.close()


def test_rollouts_are_counted_by_state_and_by_reason(connection: sqlite3.Connection) -> None:
    progress = queries.progress(connection)
    assert progress["step"] == 2
    assert progress["states"] == {"planned": 1, "filtered": 1, "delivered": 1, "trained": 2}
    assert progress["rollouts"] == {
        "planned": 5, "delivered": 3, "filtered": {"stale": 1}, "in_flight": 1, "dead": 0, "fenced": 0,
        "balanced": True,
    }  # fmt: skip
    assert queries.counted(connection) == queries.kept_counts(connection)


def test_causes_of_death_are_counted_by_kind_and_error(connection: sqlite3.Connection) -> None:
    first = {"kind": "rollout", "error": None, "jobs": 5}
    assert queries.dead_jobs(connection, limit=9) == [first, {"kind": "filter", "error": "no", "jobs": 2}]
    assert queries.dead_jobs(connection, limit=1) == [first]


def test_a_rollout_too_few_is_not_balanced() -> None:
    states = Counter({RolloutState.DELIVERED: 2, RolloutState.DEAD: 1})
    assert queries.balance(3, states, Counter(), 0)["balanced"]
    assert not queries.balance(4, states, Counter(), 0)["balanced"]


def test_files_are_found_by_group(connection: sqlite3.Connection) -> None:
    found = sorted(queries.delivered_files(connection, RUN, ["g0000001", "g0000002", "g0000003", "odd", "g9999999"]))
    assert found == [
        ("g0000001-0", 0, *FILES),
        ("g0000001-1", 0, f"{DIRECTORY}/g0000001-1/1.other/own", None),
        ("g0000002-0", 1, f"{DIRECTORY}/g0000002-0/1.aa/own", None),
    ]
    assert list(queries.delivered_files(connection, RUN, [])) == []


def test_deliveries_include_trained_rollouts(connection: sqlite3.Connection) -> None:
    delivered = [(0, "g0000001-0"), (0, "g0000001-1"), (1, "g0000002-0")]
    assert list(queries.delivered_rollouts(connection)) == delivered
    assert list(queries.delivered_rollouts(connection, from_step=1)) == delivered[2:]
    rollouts = ("g0000001-1", "g0000002-0", "g0000002-1", "g0000009-0", "odd-0")
    assert [queries.step_of(connection, rollout) for rollout in rollouts] == [0, 1, None, None, None]
    assert queries.delivered_steps(connection) == {0, 1}
    assert queries.untrained_steps(connection) == {1: 1}


def test_a_view_shows_every_rollout(connection: sqlite3.Connection) -> None:
    assert sorted(connection.execute("SELECT * FROM all_rollouts")) == [
        ("g0000001-0", "trained", None, 0, 0.25, 0.5),
        ("g0000001-1", "trained", None, 0, 0.25, 0.5),
        ("g0000002-0", "delivered", None, 1, 0.25, 0.5),
        ("g0000002-1", "filtered", "stale", None, 0.25, 0.5),
        ("g0000003-0", "planned", None, None, None, 0.5),
    ]
    kept = dict(connection.execute("SELECT id, result FROM kept_results").fetchall())
    assert {id: json.loads(text) for id, text in kept.items() if text} == {
        f"{row[0]}-{row[1]}": json.loads(row[6]) for row in ROLLOUTS if row[6]
    }


def test_a_snapshot_does_not_see_later_commits(connection: sqlite3.Connection, tmp_path: Path) -> None:
    reader = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    with queries.snapshot(reader):
        before = queries.run_state(reader)
        connection.execute(STATEMENTS["state"], ("run", "", 0, '{"steps_delivered": 2}'))
        assert queries.run_state(reader) == before
    assert queries.run_state(reader).steps_delivered == 2
    reader.close()
