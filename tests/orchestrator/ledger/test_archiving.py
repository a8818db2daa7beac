"""Closed groups leave the hot tables in small slices; their counts, files and steps stay known, and histories for a
while."""

import asyncio
import json
import random
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import admitted, generated, submitted
from support.waiting import wait_until

from headpond.ledger import queries, schema
from headpond.ledger.states import GroupState, JobState, Purpose, RolloutState
from headpond.orchestrator.ledger import ledger as ledger_module
from headpond.orchestrator.ledger import writer
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import GroupRecord
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef

RUN = "0123456789ab"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def run(path: Path, work: Callable[[Ledger], Awaitable[None]], **settings: Any) -> None:
    """Work on the ledger, then close it: what is left is archived."""

    async def run() -> None:
        ledger = Ledger(path, **settings)
        try:
            await work(ledger)
            await ledger.committed()
        finally:
            ledger.close()

    asyncio.run(run())


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with schema.reading(path) as connection:
        return connection.execute(query).fetchall()


def sizes(path: Path) -> dict[str, int]:
    tables = ("rollouts", "groups", "jobs", "closed_groups", "closed_rollouts", "histories")
    return {table: rows(path, f"SELECT count(*) FROM {table}")[0][0] for table in tables}


def drop(ledger: Ledger, group: GroupRecord, reason: str = "zero_variance") -> None:
    for rollout in group.of(RolloutState.GENERATED, RolloutState.ADMITTED):
        ledger.drop(rollout, reason)
    ledger.enter(group, GroupState.CLOSED)


def test_a_large_step_is_archived_in_slices_and_never_counted_twice(path: Path) -> None:
    groups = 5 * writer.ARCHIVED_AT_ONCE

    async def work(ledger: Ledger) -> None:
        ledger.deliver(ledger.compose(0, [admitted(ledger, 2) for _ in range(groups)]))
        await ledger.committed()
        seen = set[int]()

        def all_archived() -> bool:
            with schema.reading(path) as connection, queries.snapshot(connection):
                assert queries.counted(connection).states == {RolloutState.DELIVERED: 2 * groups}
                assert list(queries.structure_problems(connection, limit=1)) == []
                assert len(list(queries.delivered_rollouts(connection))) == 2 * groups
                archived = connection.execute("SELECT count(*) FROM closed_groups").fetchone()[0]
            seen.add(archived)
            return archived == groups

        assert not all_archived(), "the delivery archives a slice only"
        wait_until(all_archived)
        assert all(archived % writer.ARCHIVED_AT_ONCE == 0 for archived in seen)

    run(path, work)
    assert sizes(path) == {
        "rollouts": 0, "groups": 0, "jobs": 0, "closed_groups": groups, "closed_rollouts": 2 * groups,
        "histories": groups,
    }  # fmt: skip


def test_a_killed_process_leaves_the_rest_to_the_next_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(ledger: Ledger) -> None:
        ledger.deliver(ledger.compose(0, [admitted(ledger, 2) for _ in range(2 * writer.ARCHIVED_AT_ONCE)]))

    monkeypatch.setattr(writer, "ARCHIVED_AT_CLOSE", 0)
    monkeypatch.setattr(writer, "IDLE_S", 60.0)
    run(path, work)
    assert sizes(path)["groups"] == writer.ARCHIVED_AT_ONCE
    monkeypatch.undo()
    ledger = Ledger(path)
    assert (ledger.groups, ledger.jobs, ledger.states[RolloutState.DELIVERED]) == ({}, {}, 4 * writer.ARCHIVED_AT_ONCE)
    wait_until(lambda: sizes(path)["groups"] == 0)
    ledger.close()


class FailsAfterCommit:
    """A connection whose first commits are on disk although SQLite reports an error."""

    def __init__(self, connection: sqlite3.Connection, failures: int) -> None:
        self._connection = connection
        self.failures = failures

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        cursor = self._connection.execute(sql, *values)
        if sql == "COMMIT" and self.failures:
            self.failures -= 1
            raise sqlite3.OperationalError("disk I/O error")
        return cursor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_a_commit_that_is_repeated_archives_a_group_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RETRY_S", 0.01)

    async def work(ledger: Ledger) -> None:
        groups = [admitted(ledger, 2), admitted(ledger, 2)]
        await ledger.committed()
        failing = FailsAfterCommit(ledger._writer._connection, failures=2)
        ledger._writer._connection = failing  # pyright: ignore[reportAttributeAccessIssue]
        drop(ledger, groups.pop())
        ledger.deliver(ledger.compose(0, groups))
        await ledger.committed()
        assert failing.failures == 0

    run(path, work)
    assert sizes(path) == {
        "rollouts": 0, "groups": 0, "jobs": 0, "closed_groups": 2, "closed_rollouts": 4, "histories": 2,
    }  # fmt: skip
    assert rows(path, "SELECT id, state, reason, step FROM all_rollouts") == [
        ("g0000001-0", "delivered", None, 0),
        ("g0000001-1", "delivered", None, 0),
        ("g0000002-0", "filtered", "zero_variance", None),
        ("g0000002-1", "filtered", "zero_variance", None),
    ]


def test_a_closed_rollout_keeps_what_an_audit_and_a_sweep_need(path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        group = submitted(ledger, 3)
        for rollout in group.rollouts:
            ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
            directory = f"rollouts/{RUN}/{rollout.id}/2.00000000beef"
            columns = BlobRef(key=f"{directory}/columns.safetensors", size=10, checksum="c")
            result = RolloutResult(
                reward=0.25, columns=columns, sample_lengths=(5, 6), turns=2, prompt_tokens=3, tool_tokens=4,
                completion_tokens=7, version_first=8, version_last=9, truncated=True, metrics={"length": 1.5},
            )  # fmt: skip
            ledger.generated(rollout, result, attempt=2, execution="00000000beef", duration_s=1.5)
        ledger.drop(group.rollouts[0], "gibberish")
        for rollout in group.rollouts[1:]:
            rollout.advantage = 0.5
            ledger.move(rollout, RolloutState.ADMITTED)
        ledger.enter(group, GroupState.ADMITTED)
        batch = ledger.compose(0, [group], final=False)
        ledger.set_advantages(batch, {rollout.id: rollout.index - 0.125 for rollout in batch.rollouts()})
        ledger.deliver(batch)
        ledger.train(0)

    run(path, work)
    assert rows(path, "SELECT * FROM all_rollouts ORDER BY id") == [
        ("g0000001-0", "filtered", "gibberish", None, 0.25, None),
        ("g0000001-1", "trained", None, 0, 0.25, 0.875),
        ("g0000001-2", "trained", None, 0, 0.25, 1.875),
    ]
    lengths = "turns, prompt_tokens, tool_tokens, completion_tokens, samples, version_first, version_last, truncated"
    assert rows(path, f"SELECT {lengths}, attempt, execution, duration_ms FROM closed_rollouts WHERE idx = 1") == [
        (2, 3, 4, 7, 2, 8, 9, 1, 2, 0xBEEF, 1500)
    ]
    with schema.reading(path) as connection:
        assert list(queries.delivered_files(connection, RUN, ["g0000001"])) == [
            (f"g0000001-{n}", 0, f"rollouts/{RUN}/g0000001-{n}/2.00000000beef/columns.safetensors", None)
            for n in (1, 2)
        ]
    kept = json.loads(rows(path, "SELECT result FROM kept_results WHERE id = 'g0000001-1'")[0][0])
    assert (kept["metrics"], kept["sample_lengths"]) == ({"length": 1.5}, [5, 6])
    assert rows(path, "SELECT attempt, state, losses FROM kept_jobs WHERE id = 'g0000001-1'") == [(1, "settled", 0)]


def test_histories_and_events_are_deleted_after_keep_events_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PRUNE_EVERY", 1)

    async def work(ledger: Ledger) -> None:
        for step in range(6):
            drop(ledger, generated(ledger, 1))
            group = admitted(ledger, 1)
            ledger.event(group.id, "lost")
            ledger.deliver(ledger.compose(step, [group]))
            await ledger.committed()

    run(path, work, keep_events_steps=2)
    assert rows(path, "SELECT grp, step FROM histories") == [(7, 4), (9, 5), (10, 4), (11, 6), (12, 5)]
    assert rows(path, "SELECT step, subject FROM events") == [(4, "g0000010"), (5, "g0000012")]
    assert len(rows(path, "SELECT * FROM all_rollouts")) == 12


def test_histories_are_deleted_a_few_at_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PRUNE_EVERY", 1)
    monkeypatch.setattr(writer, "PRUNED_AT_ONCE", 3)
    monkeypatch.setitem(writer.KEPT_ROWS, "histories", 2)
    left = list[int]()

    async def work(ledger: Ledger) -> None:
        for _ in range(8):
            drop(ledger, generated(ledger, 1))
        for _ in range(4):
            ledger.state.epoch += 1
            await ledger.committed()
            left.append(sizes(path)["histories"])

    run(path, work)
    assert left == [5, 2, 2, 2]


def close_many(groups: int, *, evaluations: int = 0) -> Callable[[Ledger], Awaitable[None]]:
    """Groups of 8 that are open 64 at a time and close in any order, in commits of a few. Of each 4, `evaluations` are
    those of evaluations."""

    async def work(ledger: Ledger) -> None:
        chance, opened = random.Random(7), list[GroupRecord]()
        for number in range(groups):
            purpose = Purpose.EVALUATION if number % 4 < evaluations else Purpose.TRAINING
            group = submitted(ledger, 8, purpose=purpose)
            opened.append(group)
            for rollout in group.rollouts:
                ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
                result = RolloutResult(reward=chance.random(), completion_tokens=chance.randrange(30_000), turns=3)
                ledger.generated(
                    rollout, result, attempt=1, execution=f"{chance.randrange(1 << 48):012x}", duration_s=9
                )
            if len(opened) == 64:
                drop(ledger, opened.pop(chance.randrange(64)))
            if number % 8 == 0:
                await ledger.committed()
        for group in opened:
            drop(ledger, group)

    return work


def used_bytes(path: Path) -> tuple[int, int]:
    """Of the file, and of its pages that are not free. No step is delivered, so no history is deleted by itself."""
    with closing(sqlite3.connect(path)) as connection:
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return pages * size, (pages - free) * size


@pytest.mark.parametrize("evaluations", [0, 1])
def test_a_closed_rollout_takes_less_than_200_bytes_and_freed_pages_are_used_again(
    path: Path, evaluations: int
) -> None:
    settings = {"keep_events_steps": 0}
    run(path, close_many(64, evaluations=evaluations), **settings)
    forget_histories(path)
    _, used = used_bytes(path)
    run(path, close_many(256, evaluations=evaluations), **settings)
    forget_histories(path)
    file, used_after = used_bytes(path)
    assert (used_after - used) / (256 * 8) < 200
    assert used_after - used > 256 * 8 * 50, "the archive is in it"
    run(path, close_many(256, evaluations=evaluations), **settings)
    assert used_bytes(path)[0] - file < 2 * (used_after - used), "histories and hot rows are in pages that were free"


def forget_histories(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM histories")
        connection.commit()


def test_jobs_of_steps_and_surveys_leave_when_they_are_done(path: Path) -> None:
    async def work(ledger: Ledger) -> None:
        survey = ledger.add_job("e1-noop", "survey", "noop")
        ledger.submit(survey)
        batch = ledger.compose(0, [admitted(ledger, 2)])
        for rank in range(2):
            ledger.submit(ledger.add_job(batch.job_id(rank), "encode", "0"))
        await ledger.committed()
        assert sizes(path)["jobs"] == 5
        ledger.end(survey, JobState.SETTLED)
        ledger.deliver(batch)

    run(path, work)
    assert sizes(path)["jobs"] == 0


def test_causes_of_death_are_counted_after_their_jobs_are_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "CAUSES_MOST", 2)

    async def work(ledger: Ledger) -> None:
        for error in ("a", "b", "b", "c", "d", "a"):
            group = submitted(ledger, 1)
            job = ledger.jobs[group.rollouts[0].id]
            ledger.retry(job, error=error)
            ledger.kill(group.rollouts[0], error)
            ledger.end(job, JobState.DEAD)
            ledger.enter(group, GroupState.CLOSED)

    run(path, work)
    run(path, work)
    with schema.reading(path) as connection:
        assert [(each["error"], each["jobs"]) for each in queries.dead_jobs(connection, limit=9)] == [
            ("a", 4), ("b", 4), (ledger_module.OTHER_CAUSES, 4),
        ]  # fmt: skip
        assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)
