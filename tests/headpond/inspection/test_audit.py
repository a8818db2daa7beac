import asyncio
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from support.ledgers import admitted, encoded, planned, replies_of
from support.stores import manifest_path, run_store

from headpond.batches import Manifest, read_manifest, read_manifests, seal_manifest
from headpond.config import RunConfig
from headpond.errors import BlobCorrupt
from headpond.inspection import audit as audit_module
from headpond.inspection.audit import AUDITED, Scope, audit, audit_at_end
from headpond.ledger.states import GroupState, JobState, Purpose, RolloutState
from headpond.orchestrator import run_dir
from headpond.orchestrator.exchange.inputs import batch_plan
from headpond.orchestrator.ledger import rebuild
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import BatchRecord
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef, Store
from headpond.store.files import FileStore


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = RunConfig(run_dir=tmp_path / "run")
    run_dir.create_directories(config)
    run_dir.begin_or_resume(config)
    return config


def written(config: RunConfig, write: Callable[[Ledger], object]) -> None:
    async def run() -> None:
        ledger = Ledger(config.ledger_path)
        write(ledger)
        await ledger.committed()
        ledger.close()

    asyncio.run(run())


def one_step(ledger: Ledger) -> BatchRecord:
    """Four rollouts: two delivered, one filtered, one dead."""
    group = ledger.plan(environment="noop", example=0, size=4)
    for rollout, job in zip(group.rollouts, list(ledger.jobs.values()), strict=True):
        ledger.submit(job)
        ledger.end(job, JobState.SETTLED)
        ledger.generated(rollout, RolloutResult(reward=1.0))
    ledger.move(group.rollouts[0], RolloutState.FILTERED, reason="gibberish")
    ledger.move(group.rollouts[1], RolloutState.DEAD, error="the engine answered 500")
    for rollout in group.rollouts[2:]:
        rollout.advantage = 0.0
        ledger.move(rollout, RolloutState.ADMITTED)
    ledger.enter(group, GroupState.ADMITTED)
    return ledger.compose(0, [group])


def seal(config: RunConfig, batch: BatchRecord) -> None:
    ranks = encoded(config, batch)
    seal_manifest(run_store(config), batch_plan(config, batch), ranks)


def sealed(config: RunConfig) -> Callable[[Ledger], None]:
    def write(ledger: Ledger) -> None:
        batch = one_step(ledger)
        seal(config, batch)
        ledger.deliver(batch)

    return write


def test_a_run_that_has_planned_nothing_adds_up(config: RunConfig) -> None:
    written(config, lambda ledger: ledger.state.touch())
    assert audit(config.run_dir) == {
        "planned": 0, "delivered": 0, "filtered": {}, "in_flight": 0, "dead": 0, "fenced": 0,
        "balanced": True, "problems": [], "steps": 0, "delivered_steps": 0, "manifests_from": 0, "files_from": 0,
        "dead_jobs": [],
    }  # fmt: skip


def test_every_rollout_is_counted_once(config: RunConfig) -> None:
    written(config, sealed(config))
    written(config, lambda ledger: ledger.plan(environment="noop", example=1, size=3))
    written(config, lambda ledger: setattr(ledger.state, "fenced", 5))
    result = audit(config.run_dir)
    assert result["planned"] == 7
    assert (result["delivered"], result["in_flight"], result["dead"]) == (2, 3, 1)
    assert result["filtered"] == {"gibberish": 1}
    assert result["fenced"] == 5
    assert result["steps"] == 1
    assert result["balanced"], result["problems"]


def evaluated(ledger: Ledger) -> None:
    """Two groups of an evaluation, one of them closed: a rollout has its score, one is dead and three are open."""
    closed = ledger.plan(environment="held_out", example=0, size=2, purpose=Purpose.EVALUATION)
    ledger.plan(environment="held_out", example=1, size=3, purpose=Purpose.EVALUATION)
    for rollout in closed.rollouts:
        ledger.submit(ledger.jobs[rollout.id])
        ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
    ledger.generated(closed.rollouts[0], RolloutResult(reward=1.0))
    ledger.move(closed.rollouts[0], RolloutState.EVALUATED)
    ledger.kill(closed.rollouts[1], "the engine answered 500")
    ledger.enter(closed, GroupState.CLOSED)


def test_rollouts_of_evaluations_are_balanced_apart_from_those_of_training(config: RunConfig) -> None:
    written(config, sealed(config))
    before = audit(config.run_dir)
    written(config, evaluated)
    assert audit(config.run_dir) == before
    assert before["balanced"]


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE closed_rollouts SET state = 2 WHERE state = 3", "counts 1 rollouts of evaluations as dead and has 0"),
        ("UPDATE closed_rollouts SET reason = NULL WHERE grp = 2", "rollouts of evaluations as evaluated and has 2"),
        ("UPDATE groups SET purpose = 'training'", "the ledger counts 5 rollouts of evaluations as planned and has 2"),
        ("DELETE FROM jobs WHERE subject = 'g0000003'", "rollout g0000003-0 is open and has no job"),
    ],
)
def test_damage_to_the_rows_of_an_evaluation_is_found(config: RunConfig, statement: str, problem: str) -> None:
    written(config, sealed(config))
    written(config, evaluated)
    with closing(sqlite3.connect(config.ledger_path)) as connection, connection:
        connection.execute(statement)
    result = audit(config.run_dir)
    assert not result["balanced"]
    assert [found for found in result["problems"] if problem in found], result["problems"]


def test_a_step_sealed_after_the_last_commit_is_balanced(config: RunConfig) -> None:
    written(config, lambda ledger: seal(config, one_step(ledger)))
    result = audit(config.run_dir)
    assert result["balanced"], result["problems"]
    assert result["in_flight"] == 2


DAMAGE = {
    "DELETE FROM groups": "rollout g0000002-0 belongs to no group",
    "UPDATE groups SET state = 'closed'": "is open in a closed group",
    "UPDATE rollouts SET state = 'batched' WHERE idx = 2": "is batched for a step that is not open",
    "UPDATE rollouts SET step = 1 WHERE idx = 2": "has a step and is in no batch",
    "UPDATE groups SET state = 'filter'": "group g0000002 is in a stage and has no job",
    "DELETE FROM jobs": "rollout g0000002-0 is open and has no job",
    "DELETE FROM rollouts WHERE idx = 2": "the ledger counts 4 rollouts as planned and has 3",
    "UPDATE state SET content = json_set(content, '$.rollouts_planned', 5) WHERE kind = 'run'": "",
    "INSERT INTO groups VALUES ('g0000001', 1, 'noop', 0, 'closed', 'training')": "group g0000001 is archived and open",
    "DELETE FROM closed_groups": "rollout g0000001-0 is archived without its group",
    "DELETE FROM closed_rollouts WHERE idx = 3": "but not delivered in the ledger",
    "UPDATE closed_rollouts SET state = 'generated' WHERE idx = 0": "rollout g0000001-0 is open in the archive",
    "UPDATE closed_rollouts SET state = 1 WHERE idx = 0": "whose manifest does not name it",
    "UPDATE closed_rollouts SET state = 0 WHERE idx = 1": "the ledger counts 1 rollouts as dead and has 0",
    "UPDATE closed_rollouts SET reason = NULL WHERE idx = 0": "the ledger counts 1 rollouts as gibberish and has 0",
    "UPDATE closed_groups SET step = 1": "g0000001-2 is archived as delivered in a step that is not delivered",
    "UPDATE batches SET state = 'trained'": "the ledger counts 2 rollouts as delivered and has 0",
    "UPDATE state SET content = json_set(content, '$.by_name.delivered', 3) WHERE name = 'states'": (
        "the ledger counts 3 rollouts as delivered and has 2"
    ),
}


@pytest.mark.parametrize("statement", DAMAGE)
def test_every_inconsistency_is_reported(config: RunConfig, statement: str) -> None:
    """Of four archived rollouts and four planned ones."""
    written(config, sealed(config))
    written(config, planned)
    with closing(sqlite3.connect(config.ledger_path, isolation_level=None)) as connection:
        connection.execute(statement)
    result = audit(config.run_dir)
    assert not result["balanced"]
    assert DAMAGE[statement] in "\n".join(result["problems"])


def test_a_rollout_in_two_steps_is_reported(config: RunConfig) -> None:
    written(config, sealed(config))
    store = run_store(config)
    again = replace(read_manifests(store)[0].plan, step=1)
    ranks = [replace(rank, plan=again.digest) for rank in read_manifests(store)[0].ranks]
    seal_manifest(store, again, ranks)
    result = audit(config.run_dir)
    assert not result["balanced"]
    assert "rollout g0000001-2 is in step 0 and in step 1" in result["problems"]


def test_a_damaged_manifest_is_refused(config: RunConfig) -> None:
    written(config, sealed(config))
    manifest_path(run_store(config), 0).write_text("{")
    with pytest.raises(BlobCorrupt, match=r"step_000000/manifest.json is not a manifest: "):
        audit(config.run_dir)


def test_causes_of_dead_jobs_are_listed_by_frequency(config: RunConfig) -> None:
    def die(ledger: Ledger) -> None:
        replies = replies_of(config, ledger)
        for example in range(3):
            ledger.plan(environment="noop", example=example, size=1)
        for job, error in zip(list(ledger.jobs.values()), ["no", "disk", "no"], strict=True):
            for _ in range(config.recovery.max_failures):
                ledger.submit(job)
                replies.job_failed(job, error)

    written(config, die)
    result: dict[str, Any] = audit(config.run_dir)
    assert result["dead"] == 3
    assert result["dead_jobs"] == [
        {"kind": "play", "error": "no", "jobs": 2},
        {"kind": "play", "error": "disk", "jobs": 1},
    ]
    assert result["balanced"], result["problems"]


def many_steps(config: RunConfig, steps: range) -> Callable[[Ledger], None]:
    """Each of one group of two rollouts with a file of their own."""

    def write(ledger: Ledger) -> None:
        for step in steps:
            group = admitted(ledger, size=2)
            for rollout in group.rollouts:
                key = f"rollouts/run/{rollout.id}/1.x/columns"
                rollout.result = RolloutResult(reward=0.0, columns=run_store(config).put(key, [b"tokens"]))
            batch = ledger.compose(step, [group])
            seal(config, batch)
            ledger.deliver(batch)

    return write


def test_an_audit_holds_one_manifest_at_a_time(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    written(config, many_steps(config, range(40)))
    held = WeakSet[Manifest]()
    most = 0

    def counted(store: Store, step: int) -> Manifest | None:
        nonlocal most
        most = max(most, len(held))
        if manifest := read_manifest(store, step):
            held.add(manifest)
        return manifest

    for module in (audit_module, rebuild):
        monkeypatch.setattr(module, "read_manifest", counted)
    assert audit(config.run_dir)["balanced"]
    config.ledger_path.unlink()
    rebuild.rebuild_if_lost(config)
    assert most <= 1, "one may be alive while the next one is read"
    assert audit(config.run_dir)["delivered"] == 80


def opened_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opened, open_blob = list[str](), FileStore.open

    def counted(self: FileStore, ref: BlobRef, *, verify: bool = True) -> Any:
        opened.append(ref.key)
        return open_blob(self, ref, verify=verify)

    monkeypatch.setattr(FileStore, "open", counted)
    return opened


def test_the_end_of_a_run_audits_only_what_is_new(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = opened_files(monkeypatch)
    written(config, many_steps(config, range(3)))
    assert audit_at_end(config.run_dir)["manifests_from"] == 0
    assert len(opened) == 6
    written(config, many_steps(config, range(3, 5)))
    opened.clear()
    result = audit_at_end(config.run_dir)
    assert (result["balanced"], result["steps"], result["manifests_from"], result["files_from"]) == (True, 5, 3, 3)
    assert len(opened) == 4
    opened.clear()
    assert audit(config.run_dir, scope=Scope.NEW_FILES)["files_from"] == 5
    assert not opened
    assert audit(config.run_dir)["files_from"] == 0
    assert len(opened) == 10


def test_the_end_of_a_run_does_not_read_the_archive(config: RunConfig) -> None:
    """Twenty million closed rollouts take a minute to count."""
    written(config, sealed(config))
    with closing(sqlite3.connect(config.ledger_path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM closed_rollouts WHERE idx = 0")
    assert audit_at_end(config.run_dir)["balanced"]
    assert audit(config.run_dir, scope=Scope.NEW_FILES)["problems"] == [
        "the ledger counts 1 rollouts as filtered and has 0", "the ledger counts 1 rollouts as gibberish and has 0",
    ]  # fmt: skip


def test_a_file_damaged_later_is_found_by_a_full_audit(config: RunConfig) -> None:
    written(config, many_steps(config, range(2)))
    audit_at_end(config.run_dir)
    (run_store(config).root / "rollouts/run/g0000001-0/1.x/columns").write_bytes(b"broken")
    assert audit(config.run_dir, scope=Scope.NEW_FILES)["balanced"]
    assert "step 0: blob rollouts/run/g0000001-0/1.x/columns has checksum" in audit(config.run_dir)["problems"][0]


def test_a_manifest_that_disappears_is_found_without_reading_files(config: RunConfig) -> None:
    written(config, many_steps(config, range(2)))
    audit_at_end(config.run_dir)
    manifest_path(run_store(config), 0).unlink()
    assert len(problems := audit(config.run_dir, scope=Scope.NEW_FILES)["problems"]) == 1
    assert re.search("manifest of step 0 .*2 rollouts", problems[0])


def test_an_unbalanced_end_is_not_remembered(config: RunConfig) -> None:
    written(config, many_steps(config, range(2)))
    manifest_path(run_store(config), 0).unlink()
    assert not audit_at_end(config.run_dir)["balanced"]
    assert not (config.run_dir / AUDITED).exists()


@pytest.mark.parametrize("content", ["", "[]", '{"run": "other", "steps": 2}', '{"steps": "x"}'])
def test_without_a_valid_memory_everything_is_new(config: RunConfig, content: str) -> None:
    written(config, many_steps(config, range(2)))
    (config.run_dir / AUDITED).write_text(content)
    assert audit_at_end(config.run_dir)["files_from"] == 0
