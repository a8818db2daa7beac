import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import admitted, configured, generated, pipeline_of, planned

from headpond.batches.manifest import EncodedRank
from headpond.batches.signals import RankProgress, write_progress
from headpond.errors import RunError
from headpond.ledger.states import GroupState, JobState, RolloutState
from headpond.orchestrator.exchange.inputs import step_values
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import BatchRecord, GroupRecord
from headpond.orchestrator.planning.composer import Composer
from headpond.orchestrator.trainer import Trainer
from headpond.records.inputs import StepAdvantages
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef
from headpond.tasks.stages.encode import EncodeResult


def composing(ledger: Ledger, *, batch_phase: bool = False, **settings: Any) -> Composer:
    """A composer that does not wait for a trainer."""
    config = configured(trainer={"max_steps_ahead": "unlimited"}, **settings)
    return Composer(config, ledger, Trainer(config, ledger), pipeline_of(config, ledger, batch_phase=batch_phase))


def sampled_by(ledger: Ledger, version: int) -> GroupRecord:
    """An admitted group, 10 tokens a rollout."""
    return admitted(ledger, version_first=version, completion_tokens=10)


def composed(composer: Composer) -> BatchRecord:
    batch = composer.compose()
    assert batch is not None
    return batch


def end(ledger: Ledger, batch: BatchRecord, data_rank: int, state: JobState) -> None:
    job = ledger.jobs[batch.job_id(data_rank)]
    ledger.submit(job)
    file = BlobRef(key=f"rank_{data_rank}", size=1, checksum="0" * 16)
    rank = EncodedRank(
        plan="digest", data_rank=data_rank, file=file, micro_batches=1, tokens=80, samples=4, loss_tokens=40
    )
    ledger.end(job, state, result=EncodeResult(rank=rank) if state is JobState.SETTLED else None)


def test_a_step_is_composed_when_enough_groups_are_admitted(ledger: Ledger) -> None:
    composer = composing(ledger, batch={"data_ranks": 2})
    admitted(ledger)
    generated(ledger)
    assert composer.compose() is None
    admitted(ledger)
    batch = composed(composer)
    assert (batch.step, batch.formation) == (0, 1)
    assert [group.ordinal for group in batch.groups] == [1, 3]
    assert {rollout.state for rollout in batch.rollouts()} == {RolloutState.BATCHED}
    assert {job.id for job in ledger.waiting.values() if job.stage == "encode"} == {"s000000f1r0", "s000000f1r1"}


def test_one_step_is_open_at_a_time(ledger: Ledger) -> None:
    composer = composing(ledger)
    for _ in range(4):
        admitted(ledger)
    first = composed(composer)
    assert composer.compose() is None
    ledger.deliver(first)
    assert composed(composer).step == 1


def test_no_step_is_formed_after_the_last(ledger: Ledger) -> None:
    composer = composing(ledger, steps=1)
    for _ in range(4):
        admitted(ledger)
    ledger.deliver(composed(composer))
    assert composer.compose() is None


def test_a_batch_of_rollouts_takes_whole_groups(ledger: Ledger) -> None:
    composer = composing(ledger, batch={"unit": "rollouts", "size": 5})
    first, second = admitted(ledger), admitted(ledger)
    assert composed(composer).groups == [first, second]


def test_a_step_is_encoded_when_every_rank_has_a_result(ledger: Ledger) -> None:
    composer = composing(ledger, batch={"data_ranks": 2})
    for _ in range(2):
        admitted(ledger)
    batch = composed(composer)
    assert composer.encoded() is None
    end(ledger, batch, 1, JobState.SETTLED)
    assert composer.encoded() is None
    end(ledger, batch, 0, JobState.SETTLED)
    encoded = composer.encoded()
    assert encoded is not None
    assert [rank.file.key for rank in encoded[1]] == ["rank_0", "rank_1"]


def test_a_step_is_formed_again_without_the_rollouts_that_cannot_be_read(ledger: Ledger) -> None:
    composer = composing(ledger, batch={"data_ranks": 2, "unit": "rollouts", "size": 6})
    first, second = admitted(ledger), admitted(ledger)
    batch = composed(composer)
    job = ledger.jobs[batch.job_id(1)]
    ledger.submit(job)
    gone = [rollout.id for rollout in [*first.rollouts, second.rollouts[0]]]
    ledger.end(job, JobState.SETTLED, result=EncodeResult(unreadable=tuple(gone)))
    assert composer.encoded() is None
    assert ledger.reasons == {"blob_corrupt": 5}
    assert first.state == GroupState.CLOSED
    assert composer.compose() is None, "3 of the 6 rollouts are left"
    admitted(ledger)
    again = composed(composer)
    assert (again.formation, len(list(again.rollouts()))) == (2, 7)
    assert ledger.state.failed_formations == 0


def test_a_step_that_cannot_be_encoded_is_formed_again_and_finally_stops_the_run(ledger: Ledger) -> None:
    composer = composing(ledger, recovery={"max_formations": 2})
    groups = [admitted(ledger), admitted(ledger)]
    end(ledger, composed(composer), 0, JobState.DEAD)
    assert composer.encoded() is None
    assert ledger.batches == {}
    assert {group.state for group in groups} == {GroupState.ADMITTED}
    assert {rollout.step for group in groups for rollout in group.rollouts} == {None}
    again = composed(composer)
    assert (again.step, again.formation) == (0, 2)
    end(ledger, again, 0, JobState.DEAD)
    with pytest.raises(RunError, match=r"step 0 .*2 formations"):
        composer.encoded()


def test_a_step_too_far_ahead_of_the_trainer_waits_until_it_acknowledges(ledger: Ledger, tmp_path: Path) -> None:
    config = configured(run_dir=tmp_path, trainer={"max_steps_ahead": 1})
    trainer = Trainer(config, ledger)
    composer = Composer(config, ledger, trainer, pipeline_of(config, ledger))
    for _ in range(6):
        admitted(ledger)
    for _ in range(2):
        ledger.deliver(composed(composer))
    asyncio.run(trainer.read())
    assert composer.compose() is None
    write_progress(tmp_path, RankProgress(data_rank=0, data_ranks=1, epoch=1, resume_step=0, acked=0))
    asyncio.run(trainer.read())
    assert composed(composer).step == 2
    assert ledger.states[RolloutState.TRAINED] == 8


def test_a_batch_phase_is_a_job_between_composing_and_encoding(ledger: Ledger) -> None:
    admitted(ledger)
    composer = composing(ledger, batch={"size": 1}, batch_phase=True)
    batch = composed(composer)
    assert [job.id for job in ledger.waiting.values()] == ["s000000f1-batch_phase"]
    assert composer.encoded() is None
    final = {rollout.id: 2.0 for rollout in batch.rollouts()}
    composer._pipeline.batch_phase.estimated(batch, StepAdvantages(advantages=final, state='{"kept": 1}'))
    assert (batch.advantages, batch.estimator_state) == (final, '{"kept": 1}')
    assert "s000000f1-advantage" not in ledger.jobs
    assert "s000000f1r0" in ledger.waiting


def test_a_step_that_is_formed_again_starts_from_the_state_before_it(ledger: Ledger) -> None:
    composer = composing(ledger, batch={"size": 1}, batch_phase=True)
    for state in ("first", "second"):
        admitted(ledger)
        batch = composed(composer)
        composer._pipeline.batch_phase.estimated(
            batch, StepAdvantages(advantages=dict.fromkeys(_ids(batch), 0.0), state=state)
        )
        if state == "first":
            ledger.deliver(batch)
    assert step_values(batch, ledger.state.last_step.estimator_state).state == "first"
    ledger.dissolve(batch)
    again = composed(composer)
    assert (again.step, again.formation) == (1, 2)
    assert (again.advantages, again.estimator_state) == ({}, None)
    assert ledger.state.last_step.estimator_state == "first"


@pytest.mark.parametrize("state", [JobState.DEAD, JobState.CANCELLED])
def test_a_resumed_run_forms_a_step_again_whose_batch_phase_failed(ledger: Ledger, state: JobState) -> None:
    admitted(ledger)
    composer = composing(ledger, batch={"size": 1}, batch_phase=True)
    batch = composed(composer)
    composer.resume()
    assert list(ledger.batches.values()) == [batch], "its job is waiting"
    ledger.end(ledger.jobs[batch.batch_phase_id], state)
    if state is JobState.CANCELLED:
        ledger.jobs.pop(batch.batch_phase_id)
    composer.resume()
    assert composed(composer).formation == 2


def test_a_step_whose_encoding_job_was_cancelled_is_formed_again(ledger: Ledger) -> None:
    admitted(ledger)
    composer = composing(ledger, batch={"size": 1, "data_ranks": 2})
    batch = composed(composer)
    assert composer.encoded() is None
    assert list(ledger.batches.values()) == [batch], "its jobs are waiting"
    ledger.end(ledger.jobs[batch.job_id(1)], JobState.CANCELLED)
    ledger.jobs.pop(batch.job_id(1))
    assert composer.encoded() is None
    assert composed(composer).formation == 2


def _ids(batch: BatchRecord) -> list[str]:
    return [rollout.id for rollout in batch.rollouts()]


def test_without_a_batch_phase_the_advantages_are_those_of_the_groups(ledger: Ledger) -> None:
    group = admitted(ledger)
    batch = composed(composing(ledger, batch={"size": 1}))
    assert batch.advantages == {rollout.id: rollout.advantage for rollout in group.rollouts}


def test_a_batch_of_tokens_takes_groups_until_it_has_enough(ledger: Ledger) -> None:
    composer = composing(ledger, batch={"unit": "tokens", "size": 41})
    first = sampled_by(ledger, 0)
    assert composer.compose() is None
    second, _ = sampled_by(ledger, 0), sampled_by(ledger, 0)
    assert composed(composer).groups == [first, second]


def test_a_step_takes_its_share_of_every_environment(ledger: Ledger) -> None:
    environments = {"maths": {"use": "noop"}, "noop": {"use": "noop"}}
    composer = composing(ledger, environments=environments)
    first, _ = admitted(ledger), admitted(ledger)
    assert composer.compose() is None
    other = admitted(ledger, environment="maths")
    assert composed(composer).groups == [first, other]


def test_stale_rollouts_are_dropped_before_a_step_is_formed(ledger: Ledger) -> None:
    composer = composing(ledger, filters={"stale": {"max_off_policy_steps": 2}})
    stale, partial, fresh = (sampled_by(ledger, version) for version in (0, 1, 1))
    partial.rollouts[0].result = RolloutResult(reward=0.0, version_first=0)
    ledger.state.policy_version = 3
    assert composed(composer).groups == [partial, fresh]
    assert stale.state == GroupState.CLOSED
    assert ledger.reasons == {"stale": 5}
    assert ledger.states[RolloutState.BATCHED] == 7


def test_a_group_is_checked_for_staleness_when_admitted_and_at_every_version(ledger: Ledger) -> None:
    composer = composing(ledger, filters={"stale": {"max_off_policy_steps": 2}})
    ledger.state.policy_version = 3
    fresh = sampled_by(ledger, 1)
    assert composer.compose() is None
    late = sampled_by(ledger, 0)
    assert composer.compose() is None
    assert (fresh.state, late.state) == (GroupState.ADMITTED, GroupState.CLOSED)
    ledger.state.policy_version = 4
    assert composer.compose() is None
    assert fresh.state == GroupState.CLOSED


def test_a_step_with_a_rollout_that_became_stale_is_formed_again(ledger: Ledger) -> None:
    composer = composing(ledger, filters={"stale": {"max_off_policy_steps": 2}})
    old, new, next_one = (sampled_by(ledger, version) for version in (0, 1, 1))
    batch = composed(composer)
    assert batch.groups == [old, new]
    end(ledger, batch, 0, JobState.SETTLED)
    ledger.state.policy_version = 3
    assert composer.encoded() is None
    assert composed(composer).groups == [new, next_one]


def test_a_step_does_not_run_ahead_of_the_groups_that_were_planned_first(ledger: Ledger) -> None:
    """Fast groups may overtake slow ones within a window of two batches of open groups."""
    slow = [planned(ledger) for _ in range(3)]
    composer = composing(ledger, batch={"window": 2})
    inside = admitted(ledger)
    for _ in range(4):
        admitted(ledger)
    assert composer.compose() is None
    ledger.enter(slow[0], GroupState.CLOSED)
    batch = composed(composer)
    assert batch.groups[0] is inside
    assert [group.ordinal for group in batch.groups] == [4, 5]


def test_a_batch_of_tokens_waits_for_the_groups_that_were_planned_first(ledger: Ledger) -> None:
    """Without a window, steps would be made of the groups with the shortest rollouts."""
    composer = composing(ledger, batch={"unit": "tokens", "size": 80, "window": 2})
    ledger.state.environments["noop"].groups_admitted = 1
    ledger.state.environments["noop"].tokens_admitted = 40
    slow = [planned(ledger) for _ in range(4)]
    short = [sampled_by(ledger, 0) for _ in range(3)]
    assert composer.compose() is None
    ledger.enter(slow[0], GroupState.CLOSED)
    assert composer.compose() is None
    ledger.enter(slow[1], GroupState.CLOSED)
    assert composed(composer).groups == short[:2]


def test_in_order_of_completion_no_group_is_waited_for(ledger: Ledger) -> None:
    for _ in range(9):
        planned(ledger)
    groups = [admitted(ledger), admitted(ledger)]
    assert composed(composing(ledger, batch={"order": "completion"})).groups == groups


def test_groups_beyond_a_window_of_partial_groups_are_used_when_none_in_it_is_pending(ledger: Ledger) -> None:
    composer = composing(ledger, batch={"unit": "rollouts", "size": 8, "window": 1})
    groups = [admitted(ledger) for _ in range(3)]
    ledger.drop(groups[0].rollouts[0], "stale")
    assert composed(composer).groups == groups


def test_what_becomes_stale_between_two_slices_is_in_no_step(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the slices, a group is admitted and the trainer publishes a version."""
    monkeypatch.setattr("headpond.orchestrator.planning.composer.CHECKED_AT_ONCE", 1)
    composer = composing(ledger, filters={"stale": {"max_off_policy_steps": 2}})
    old, new = sampled_by(ledger, 0), sampled_by(ledger, 1)
    late: list[GroupRecord] = []

    async def main() -> None:
        dropping = asyncio.create_task(composer.drop_stale())
        for _ in range(2):
            await asyncio.sleep(0)
        assert (old.checked_version, new.checked_version) == (0, None)
        late.append(sampled_by(ledger, 0))
        ledger.state.policy_version = 3
        late.append(sampled_by(ledger, 1))
        await dropping

    asyncio.run(main())
    assert composed(composer).groups == [new, late[1]]
    assert (old.state, late[0].state) == (GroupState.CLOSED, GroupState.CLOSED)
    assert ledger.reasons == {"stale": 8}


def test_admitted_work_is_counted_as_it_moves(ledger: Ledger) -> None:
    def held(environment: str) -> list[int]:
        return [ledger.admitted[environment, unit] for unit in ("groups", "rollouts", "tokens")]

    composer = composing(ledger, environments={"maths": {"use": "noop"}, "noop": {"use": "noop"}})
    first = admitted(ledger, completion_tokens=10)
    admitted(ledger, environment="maths", completion_tokens=5)
    assert (held("noop"), held("maths")) == ([1, 4, 40], [1, 4, 20])
    ledger.drop(first.rollouts[0], "stale")
    assert held("noop") == [1, 3, 30]
    batch = composed(composer)
    assert (held("noop"), held("maths")) == ([0, 0, 0], [0, 0, 0])
    composer.form_again(batch, "a test")
    assert (held("noop"), held("maths")) == ([1, 3, 30], [1, 4, 20])
    for rollout in first.rollouts[1:]:
        ledger.drop(rollout, "stale")
    ledger.enter(first, GroupState.CLOSED)
    assert held("noop") == [0, 0, 0]
