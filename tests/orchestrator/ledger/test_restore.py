"""A reopened ledger holds all open records and the counts of the closed ones."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.ledgers import admitted, configured, encoded, generated, pipeline_of, planned, submitted
from support.stores import run_store

from headpond.batches import Manifest, seal_manifest
from headpond.ids import rollout_directory
from headpond.inspection.audit import audit
from headpond.ledger.state_rows import RELEASED, Rows, StateRow
from headpond.ledger.states import GroupState, JobState, Purpose, RolloutState
from headpond.orchestrator import run_dir
from headpond.orchestrator.exchange.inputs import batch_plan
from headpond.orchestrator.ledger import rebuild, restore
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.planning.composer import Composer
from headpond.orchestrator.release import release_step
from headpond.orchestrator.trainer import Trainer
from headpond.records.rollout import RolloutResult
from headpond.tasks.stages.encode import EncodeResult


def written(path: Path, write: Callable[[Ledger], object]) -> Ledger:
    """The closed ledger after `write` was committed, for comparison."""

    async def run() -> Ledger:
        ledger = Ledger(path)
        write(ledger)
        await ledger.committed()
        ledger.close()
        return ledger

    return asyncio.run(run())


def state_contents(row: StateRow | Rows[Any, Any]) -> list[str]:
    """Every row that differs from a new one."""
    if isinstance(row, Rows):
        return [content for each in row.values() for content in state_contents(each)]
    inner = [each for each in vars(row).values() if isinstance(each, StateRow | Rows)]
    own = [f"{type(row).__name__} {row.content()}"] if row != type(row)() else []
    return sorted([*own, *(content for each in inner for content in state_contents(each))])


def contents(ledger: Ledger | restore.Records) -> dict[str, Any]:
    return {
        "groups": {
            id: (group.row(), [rollout.row() for rollout in group.rollouts]) for id, group in ledger.groups.items()
        },
        "jobs": {id: job.row() for id, job in ledger.jobs.items()},
        "batches": {
            step: (batch.row(), [group.id for group in batch.groups], batch.advantages)
            for step, batch in ledger.batches.items()
        },
        "state": state_contents(ledger.state),
        "untrained": ledger.untrained,
    }


def test_open_records_are_restored(tmp_path: Path) -> None:
    def write(ledger: Ledger) -> None:
        planned(ledger)
        ledger.retry(ledger.jobs[submitted(ledger).rollouts[0].id], error="it broke", failures=1)
        ledger.enter(generated(ledger), "filter")
        admitted(ledger).rollouts[1].masked = True
        evaluated = ledger.plan(environment="held_out", example=0, size=3, purpose=Purpose.EVALUATION)
        ledger.move(evaluated.rollouts[0], RolloutState.EVALUATED, reason="dead")
        ledger.state.evaluated["held_out"].begun = 1
        ledger.state.position = "17-3"
        config = configured(batch={"size": 1, "data_ranks": 2, "order": "completion"})
        batch = Composer(config, ledger, Trainer(config, ledger), pipeline_of(config, ledger)).compose()
        assert batch is not None
        job = ledger.jobs[batch.job_id(0)]
        ledger.submit(job)
        ledger.end(job, JobState.SETTLED, result=EncodeResult(rank=encoded(config, batch)[0]))

    before = written(tmp_path / "ledger.sqlite", write)
    after = restore.read(tmp_path / "ledger.sqlite")
    assert contents(after) == contents(before)
    assert {job.state for job in after.jobs.values()} == {JobState.WAITING, JobState.SUBMITTED, JobState.SETTLED}


def test_closed_records_are_counted_but_not_restored(tmp_path: Path) -> None:
    def write(ledger: Ledger) -> None:
        batch = ledger.compose(0, [admitted(ledger)])
        ledger.deliver(batch)
        dropped = generated(ledger)
        for rollout in dropped.rollouts:
            ledger.move(rollout, RolloutState.FILTERED, reason="zero_variance")
        ledger.enter(dropped, GroupState.CLOSED)

    written(tmp_path / "ledger.sqlite", write)
    after = restore.read(tmp_path / "ledger.sqlite")
    assert (after.groups, after.jobs, after.batches) == ({}, {}, {})
    assert +after.state.rollout_counts["states"].by_name == {RolloutState.DELIVERED: 4, RolloutState.FILTERED: 4}
    assert +after.state.rollout_counts["reasons"].by_name == {"zero_variance": 4}
    assert after.state.steps_delivered == 1
    assert after.untrained == {0: 4}


def test_trained_steps_stay_trained(tmp_path: Path) -> None:
    def write(ledger: Ledger) -> None:
        for step in range(2):
            ledger.deliver(ledger.compose(step, [admitted(ledger)]))
        ledger.train(0)

    written(tmp_path / "ledger.sqlite", write)
    after = restore.read(tmp_path / "ledger.sqlite")
    assert +after.state.rollout_counts["states"].by_name == {RolloutState.TRAINED: 4, RolloutState.DELIVERED: 4}
    assert after.untrained == {1: 4}


def test_a_survey_of_an_environment_named_like_a_step_outlives_that_step(tmp_path: Path) -> None:
    def write(ledger: Ledger) -> None:
        ledger.add_job("e1-0", "survey", "0")
        ledger.deliver(ledger.compose(0, [admitted(ledger)]))

    written(tmp_path / "ledger.sqlite", write)
    assert list(restore.read(tmp_path / "ledger.sqlite").jobs) == ["e1-0"]


def test_encoding_jobs_of_an_earlier_formation_are_not_restored(tmp_path: Path) -> None:
    def write(ledger: Ledger) -> None:
        admitted(ledger)
        config = configured(batch={"size": 1})
        composer = Composer(config, ledger, Trainer(config, ledger), pipeline_of(config, ledger))
        first = composer.compose()
        assert first is not None
        ledger.dissolve(first)
        assert composer.compose() is not None

    written(tmp_path / "ledger.sqlite", write)
    assert list(restore.read(tmp_path / "ledger.sqlite").jobs) == ["s000000f2r0"]


def test_a_new_ledger_restores_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    assert restore.read(path) == restore.Records()
    path.touch()
    assert restore.read(path) == restore.Records(), "the first start died before it had made its tables"


def test_a_lost_ledger_is_rebuilt_from_the_manifests(tmp_path: Path) -> None:
    config = configured(run_dir=tmp_path / "run")
    run_dir.create_directories(config)
    run_dir.begin_or_resume(config)

    def deliver(ledger: Ledger) -> None:
        group = admitted(ledger)
        ledger.move(group.rollouts[0], RolloutState.FILTERED, reason="gibberish")
        batch = ledger.compose(0, [group])
        ranks = encoded(config, batch)
        seal_manifest(run_store(config), batch_plan(config, batch), ranks, estimator_state='{"steps": 1}')
        ledger.deliver(batch)
        planned(ledger)

    written(config.ledger_path, deliver)
    config.ledger_path.unlink()
    rebuild.rebuild_if_lost(config)
    result = audit(config.run_dir)
    assert result["balanced"], result["problems"]
    assert (result["planned"], result["delivered"], result["filtered"]) == (4, 3, {"ledger_lost": 1})
    kept = restore.read(config.ledger_path)
    assert kept.state.steps_delivered == 1
    assert kept.state.last_step.estimator_state == '{"steps": 1}'
    before = config.ledger_path.read_bytes()
    rebuild.rebuild_if_lost(config)
    assert config.ledger_path.read_bytes() == before, "a ledger that is there is left alone"


def test_a_rebuilt_ledger_knows_what_was_released(tmp_path: Path) -> None:
    """A file that is gone and that the trainer may still read is missing, also in a step before a released one."""
    config = configured(run_dir=tmp_path / "run", trainer={"keep_steps": 1}, batch={"size": 1})
    run_dir.create_directories(config)
    run = run_dir.begin_or_resume(config)
    store, manifests = run_store(config), list[Manifest]()

    def deliver(ledger: Ledger) -> None:
        for step in range(4):
            group = admitted(ledger)
            for rollout in group.rollouts:
                place = f"{rollout_directory(run, rollout.id)}/1.0123456789ab"
                columns, experts = (store.put(f"{place}/{name}", [b"tokens"]) for name in ("columns", "experts"))
                rollout.result = RolloutResult(reward=0.0, columns=columns, experts=experts, sample_lengths=(1,))
            batch = ledger.compose(step, [group])
            manifests.append(seal_manifest(store, batch_plan(config, batch), encoded(config, batch)))
            ledger.deliver(batch)

    written(config.ledger_path, deliver)
    for step, counter in ((0, "experts_released"), (1, "experts_released"), (0, "columns_released")):
        release_step(store, manifests[step], counter, dict.fromkeys(RELEASED, 0) | {counter: step + 1})
    allowed = {"experts_released": 3, "columns_released": 2, "jsonl_released": 0}

    def rebuilt(allowed: dict[str, int]) -> tuple[dict[str, Any], list[str]]:
        config.ledger_path.unlink()
        rebuild.rebuild_if_lost(config, lambda: allowed)
        return restore.read(config.ledger_path).state, audit(config.run_dir)["problems"]

    state, problems = rebuilt(allowed)
    assert problems == []
    assert {counter: state.released[counter] for counter in allowed} == {
        **allowed,
        "experts_released": 2,
        "columns_released": 1,
    }
    assert state.delivered_bytes == len(b"tokens") * (2 * 4 + 3 * 4)
    assert len(rebuilt(allowed | {"columns_released": 0})[1]) == 4, "the trainer has not released these"


def test_a_ledger_that_is_lost_before_the_first_step_does_not_use_its_ids_again(tmp_path: Path) -> None:
    """A late reply to a rollout of the lost ledger would settle another one."""
    config = configured(run_dir=tmp_path / "run")
    run_dir.create_directories(config)
    rebuild.rebuild_if_lost(config)
    assert not config.ledger_path.exists(), "a run that begins has nothing to rebuild"
    run_store(config).write("rollouts/0123456789ab/g0000001-0/1.0123456789ab/columns", b"x")
    rebuild.rebuild_if_lost(config)
    ids = list[str]()
    written(config.ledger_path, lambda ledger: ids.append(planned(ledger).id))
    kept = restore.read(config.ledger_path)
    assert (ids, kept.state.steps_delivered, kept.state.rollouts_planned) == (["g1000001"], 0, 4)


def test_a_step_that_is_composed_dissolved_and_composed_again_is_restored(tmp_path: Path) -> None:
    """The rows of its rollouts are changed by statements, whatever is committed together."""
    path = tmp_path / "ledger.sqlite"

    async def run(*commit_after: int) -> tuple[dict[RolloutState, int], dict[RolloutState, int]]:
        ledger = Ledger(path)
        groups = [admitted(ledger), admitted(ledger)]
        for number in range(4):
            if number in (0, 2):
                ledger.compose(0, groups)
            elif number == 1:
                ledger.dissolve(ledger.batches[0])
                ledger.drop(groups[0].rollouts[0], "stale")
            if number in commit_after:
                await ledger.committed()
        await ledger.committed()
        ledger.close()
        restored = Ledger(path)
        restored.close()
        assert {rollout.step for rollout in restored.batches[0].rollouts()} == {0}
        path.unlink()
        return +ledger.states, +restored.states

    for commit_after in [(), (0,), (1,), (0, 1)]:
        held, restored = asyncio.run(run(*commit_after))
        assert held == restored == {RolloutState.BATCHED: 7, RolloutState.FILTERED: 1}
