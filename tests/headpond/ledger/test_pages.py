import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.run_dirs import make_run

from headpond.ledger import histories, pages, schema
from headpond.ledger.pages import Filter, Key
from headpond.ledger.states import RolloutState
from headpond.ledger.waterfall import Waterfall


@pytest.fixture(params=["hot", "archived"])
def connection(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[sqlite3.Connection]:
    """Two delivered groups of three, the first trained; a filtered, a dead and a running one."""
    run = make_run(tmp_path / "run", archived=request.param == "archived")
    with schema.reading(run.path / "ledger.sqlite") as connection:
        yield connection


def ids(connection: sqlite3.Connection, wanted: Filter, limit: int = 100) -> list[str]:
    return [row["id"] for row in pages.rollouts_page(connection, wanted, limit=limit).rows]


def test_pages_hold_every_rollout_once_newest_first(connection: sqlite3.Connection) -> None:
    found, before = list[str](), None
    for _ in range(20):
        page = pages.rollouts_page(connection, Filter(), before=before, limit=4)
        found += [row["id"] for row in page.rows]
        if page.next is None:
            break
        before = page.next
    groups = ("g0001002", "g0001001", "g0001000", "g0000002", "g0000001")
    assert found == [f"{group}-{index}" for group in groups for index in (2, 1, 0)]


@pytest.mark.parametrize(
    ("wanted", "group"),
    [
        (Filter(state=RolloutState.TRAINED), "g0000001"),
        (Filter(state=RolloutState.DELIVERED), "g0000002"),
        (Filter(step=1), "g0000002"),
        (Filter(reason="zero_variance"), "g0001000"),
        (Filter(state=RolloutState.DEAD), "g0001001"),
        (Filter(state=RolloutState.RUNNING), "g0001002"),
        (Filter(state=RolloutState.DEAD, lost_before_generation=True), "g0001001"),
    ],
)
def test_a_filter_finds_its_rollouts(connection: sqlite3.Connection, wanted: Filter, group: str) -> None:
    assert ids(connection, wanted) == [f"{group}-{index}" for index in (2, 1, 0)]


def test_an_unknown_reason_finds_nothing(connection: sqlite3.Connection) -> None:
    assert ids(connection, Filter(reason="none such")) == []


def test_a_page_of_a_rare_kind_reads_a_bounded_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(pages, "SCANNED_MOST", 4)
    with schema.reading(run.path / "ledger.sqlite") as connection:
        first = pages.rollouts_page(connection, Filter(state=RolloutState.TRAINED), limit=50)
        assert first.rows == []
        assert first.next == Key(1000, 1)
        found, before = list[str](), first.next
        while before:
            page = pages.rollouts_page(connection, Filter(state=RolloutState.TRAINED), before=before, limit=50)
            found, before = found + [row["id"] for row in page.rows], page.next
        assert found == ["g0000001-2", "g0000001-1", "g0000001-0"]


def test_a_group_has_its_results_jobs_and_events(connection: sqlite3.Connection) -> None:
    rows, kept = pages.group_rows(connection, "g0000001"), histories.kept_of_group(connection, "g0000001")
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert {row["environment"] for row in rows} == {"sums"}
    assert [kept.results[index]["completion_tokens"] for index in range(3)] == [18, 19, 20]
    assert [event["action"] for event in histories.group_events(connection, "g0000001")] == ["lost"]
    assert histories.kept_of_group(connection, "g0001001").errors == {0: "boom", 1: "boom", 2: "boom"}
    assert pages.group_rows(connection, "g0009999") == []


def test_the_waterfall_counts_every_rollout_where_it_ended(connection: sqlite3.Connection) -> None:
    fall = Waterfall().read(connection, budget_s=10.0)
    stages = {stage["name"]: stage for stage in fall["stages"]}
    assert fall["read_share"] == 1.0
    assert {name: stage["rollouts"] for name, stage in stages.items()} == {
        "planned": 15, "generated": 9, "scored": 9, "admitted": 6, "batched": 6, "delivered": 6, "trained": 3,
    }  # fmt: skip
    assert stages["planned"]["waiting"]["rollouts"] == 3
    assert [(one["state"], one["rollouts"]) for one in stages["planned"]["lost"]] == [("dead", 3)]
    assert [(one["reason"], one["rollouts"], one["tokens"]) for one in stages["scored"]["lost"]] == [
        ("zero_variance", 3, 21)
    ]
    assert stages["trained"]["tokens"] == 18 + 19 + 20
    assert stages["delivered"]["waiting"]["seconds"] == pytest.approx(3 * 0.5), "of the engine"


def test_the_waterfall_of_a_large_archive_is_read_over_several_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setattr("headpond.ledger.waterfall.BLOCK", 1)
    with schema.reading(run.path / "ledger.sqlite") as connection:
        waterfall = Waterfall()
        assert waterfall.read(connection, budget_s=0.0)["read_share"] == 0.0
        whole = waterfall.read(connection, budget_s=10.0)
        queries = list[str]()
        connection.set_trace_callback(queries.append)
        assert waterfall.read(connection, budget_s=10.0) == whole
        assert not any("grp >= 1 AND grp < 2 " in query for query in queries)
