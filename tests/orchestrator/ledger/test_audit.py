import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import encoded
from support.stores import manifest_path, run_store

from orchestrator import run_dir
from orchestrator.gates import Gates
from orchestrator.groups import Groups
from orchestrator.inputs import batch_plan
from orchestrator.ledger.audit import audit
from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.records import BatchRecord
from penstock.batches import read_manifests, seal_manifest
from penstock.config import RunConfig
from penstock.errors import BlobCorrupt
from penstock.ledger.states import GroupState, JobState, RolloutState
from penstock.messages import RolloutResult


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
    written(config, lambda ledger: ledger.increment("epoch"))
    assert audit(config.run_dir) == {
        "planned": 0, "delivered": 0, "filtered": {}, "in_flight": 0, "dead": 0, "fenced": 0,
        "balanced": True, "problems": [], "steps": 0, "dead_jobs": [],
    }  # fmt: skip


def test_every_rollout_is_counted_once(config: RunConfig) -> None:
    written(config, sealed(config))
    written(config, lambda ledger: ledger.plan(environment="noop", example=1, size=3))
    written(config, lambda ledger: ledger.increment("fenced", 5))
    result = audit(config.run_dir)
    assert result["planned"] == 7
    assert (result["delivered"], result["in_flight"], result["dead"]) == (2, 3, 1)
    assert result["filtered"] == {"gibberish": 1}
    assert result["fenced"] == 5
    assert result["steps"] == 1
    assert result["balanced"], result["problems"]


def test_a_step_sealed_after_the_last_commit_is_balanced(config: RunConfig) -> None:
    written(config, lambda ledger: seal(config, one_step(ledger)))
    result = audit(config.run_dir)
    assert result["balanced"], result["problems"]
    assert result["in_flight"] == 2


DAMAGE = {
    "DELETE FROM groups": "rollout g0000001-0 belongs to no group",
    "DELETE FROM rollouts WHERE idx = 3": "but not delivered in the ledger",
    "UPDATE rollouts SET state = 'generated', reason = NULL WHERE idx = 0": "is open in a closed group",
    "UPDATE rollouts SET state = 'batched' WHERE idx = 2": "is batched for a step that is not open",
    "UPDATE rollouts SET state = 'admitted' WHERE idx = 2": "has a step and is in no batch",
    "UPDATE groups SET state = 'filtering'": "group g0000001 is in a stage and has no job",
    "UPDATE rollouts SET state = 'planned', step = NULL WHERE idx = 2": "is open and has no job",
    "UPDATE rollouts SET state = 'delivered', step = 0 WHERE idx = 0": "whose manifest does not name it",
    "UPDATE meta SET value = 5 WHERE key = 'rollouts_planned'": "",
}


@pytest.mark.parametrize("statement", DAMAGE)
def test_every_inconsistency_is_reported(config: RunConfig, statement: str) -> None:
    written(config, sealed(config))
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
    with pytest.raises(BlobCorrupt, match=r"step_000000/manifest.json is not a manifest: .*; restore it"):
        audit(config.run_dir)


def test_causes_of_dead_jobs_are_listed_by_frequency(config: RunConfig) -> None:
    def die(ledger: Ledger) -> None:
        groups = Groups(config, ledger, Gates())
        for example in range(3):
            ledger.plan(environment="noop", example=example, size=1)
        for job, error in zip(list(ledger.jobs.values()), ["no", "disk", "no"], strict=True):
            for _ in range(config.recovery.max_failures):
                ledger.submit(job)
                groups.job_failed(job, error)

    written(config, die)
    result: dict[str, Any] = audit(config.run_dir)
    assert result["dead"] == 3
    assert result["dead_jobs"] == [
        {"kind": "rollout", "error": "no", "jobs": 2},
        {"kind": "rollout", "error": "disk", "jobs": 1},
    ]
    assert result["balanced"], result["problems"]
