"""Exits that a run must be resumable from: the cause is repaired, and the same ledger goes on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import admitted, configured, encoded, pipeline_of

from headpond.config import RunConfig
from headpond.errors import OtherPlan, RunError
from headpond.ledger.states import JobState, RolloutState
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import BatchRecord
from headpond.orchestrator.planning.composer import Composer, Sealer
from headpond.orchestrator.planning.planner import Planner
from headpond.orchestrator.trainer import Trainer
from headpond.tasks.stages.encode import EncodeResult


def of(tmp_path: Path, **settings: Any) -> RunConfig:
    return configured(run_dir=tmp_path, trainer={"max_steps_ahead": "unlimited"}, **settings)


def composer_of(config: RunConfig, ledger: Ledger) -> Composer:
    return Composer(config, ledger, Trainer(config, ledger), pipeline_of(config, ledger))


def composed(composer: Composer) -> BatchRecord:
    batch = composer.compose()
    assert batch is not None
    return batch


def die(ledger: Ledger, batch: BatchRecord) -> None:
    ledger.submit(ledger.jobs[batch.job_id(0)])
    ledger.end(ledger.jobs[batch.job_id(0)], JobState.DEAD)


async def committed_and_closed(ledger: Ledger) -> None:
    await ledger.committed()
    ledger.close()


def test_a_run_that_stopped_after_max_formations_forms_the_step_again(tmp_path: Path) -> None:
    config = of(tmp_path, recovery={"max_formations": 1})

    async def stop() -> None:
        ledger = Ledger(config.ledger_path)
        composer = composer_of(config, ledger)
        for _ in range(2):
            admitted(ledger)
        die(ledger, composed(composer))
        with pytest.raises(RunError, match="could not be encoded in 1 formations"):
            composer.encoded()
        await committed_and_closed(ledger)

    asyncio.run(stop())
    ledger = Ledger(config.ledger_path)
    composer = composer_of(config, ledger)
    composer.resume()
    assert composer.encoded() is None
    assert (composed(composer).step, ledger.states[RolloutState.BATCHED]) == (0, 8)
    ledger.close()


def test_a_dead_encoding_job_found_at_start_makes_the_step_form_again(tmp_path: Path) -> None:
    """The orchestrator was killed after it had committed the death and before it formed the step again."""
    config = of(tmp_path)

    async def stop() -> None:
        ledger = Ledger(config.ledger_path)
        for _ in range(2):
            admitted(ledger)
        die(ledger, composed(composer_of(config, ledger)))
        await committed_and_closed(ledger)

    asyncio.run(stop())
    ledger = Ledger(config.ledger_path)
    composer = composer_of(config, ledger)
    composer.resume()
    assert composer.encoded() is None
    assert composed(composer).formation == 2
    ledger.close()


def test_a_run_that_stopped_because_everything_was_dropped_plans_again(tmp_path: Path) -> None:
    config = of(tmp_path, batch={"max_empty_batches": 1})

    async def stop() -> None:
        ledger = Ledger(config.ledger_path)
        ledger.state.environments["noop"].examples = 10
        for _ in range(2):
            ledger.state.dropped_in_a_row += 1
        planner = Planner(config, ledger, Trainer(config, ledger), pipeline_of(config, ledger))
        with pytest.raises(RunError):
            planner.plan()
        await committed_and_closed(ledger)

    asyncio.run(stop())
    ledger = Ledger(config.ledger_path)
    planner = Planner(config, ledger, Trainer(config, ledger), pipeline_of(config, ledger))
    planner.resume()
    planner.plan()
    assert ledger.groups
    ledger.close()


@pytest.mark.parametrize(
    "changed",
    [{"seq_len": 128}, {"normalise": "rollout"}, {"format": "prime-rl"}],
    ids=lambda each: next(iter(each)),
)
def test_a_step_encoded_with_other_batch_settings_is_formed_again(tmp_path: Path, changed: dict[str, Any]) -> None:
    before = of(tmp_path, batch={"data_ranks": 2})
    after = of(tmp_path, batch={"data_ranks": 2} | changed)

    async def encode() -> None:
        ledger = Ledger(before.ledger_path)
        for _ in range(2):
            admitted(ledger)
        batch = composed(composer_of(before, ledger))
        for rank in encoded(before, batch):
            job = ledger.jobs[batch.job_id(rank.data_rank)]
            ledger.submit(job)
            ledger.end(job, JobState.SETTLED, result=EncodeResult(rank=rank))
        await committed_and_closed(ledger)

    async def resume() -> None:
        ledger = Ledger(after.ledger_path)
        composer = composer_of(after, ledger)
        composer.resume()
        ready = composer.encoded()
        if ready is not None:
            with pytest.raises(OtherPlan, match="encoded with other settings"):
                await Sealer(after).seal(*ready)
            composer.form_again(ready[0], "other settings")
        assert ledger.batches == {}
        again = composed(composer)
        assert (again.step, again.formation) == (0, 2)
        assert ledger.state.failed_formations == 0
        ledger.close()

    asyncio.run(encode())
    asyncio.run(resume())
