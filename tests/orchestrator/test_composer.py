import pytest
from support.ledgers import admitted, configured, generated

from orchestrator.composer import Composer
from orchestrator.ledger import Ledger
from orchestrator.records import Batch
from orchestrator.states import GroupState, JobState, RolloutState
from penstock.errors import RunError
from penstock.messages import EncodeResult, Queue


def composed(composer: Composer) -> Batch:
    batch = composer.compose()
    assert batch is not None
    return batch


def end(ledger: Ledger, batch: Batch, data_rank: int, state: JobState) -> None:
    job = ledger.jobs[batch.job_id(data_rank)]
    ledger.submit(job)
    result = EncodeResult(file=f"rank_{data_rank}", samples=4, loss_tokens=40).model_dump_json()
    ledger.end(job, state, result=result if state is JobState.SETTLED else None)


def test_a_step_is_formed_when_there_is_enough(ledger: Ledger) -> None:
    composer = Composer(configured(batch={"data_ranks": 2}), ledger)
    admitted(ledger)
    generated(ledger)
    assert composer.compose() is None
    admitted(ledger)
    batch = composed(composer)
    assert (batch.step, batch.formation) == (0, 1)
    assert [group.ordinal for group in batch.groups] == [1, 3]
    assert {rollout.state for rollout in batch.rollouts()} == {RolloutState.BATCHED}
    assert {job.id for job in ledger.waiting.values() if job.queue is Queue.ENCODING} == {"s000000f1r0", "s000000f1r1"}


def test_one_step_is_open_at_a_time(ledger: Ledger) -> None:
    composer = Composer(configured(), ledger)
    for _ in range(4):
        admitted(ledger)
    first = composed(composer)
    assert composer.compose() is None
    ledger.deliver(first)
    assert composed(composer).step == 1


def test_no_step_is_formed_after_the_last(ledger: Ledger) -> None:
    composer = Composer(configured(steps=1), ledger)
    for _ in range(4):
        admitted(ledger)
    ledger.deliver(composed(composer))
    assert composer.compose() is None


def test_a_batch_of_rollouts_takes_whole_groups(ledger: Ledger) -> None:
    composer = Composer(configured(batch={"unit": "rollouts", "size": 5}), ledger)
    first, second = admitted(ledger), admitted(ledger)
    assert composed(composer).groups == [first, second]


def test_a_step_is_encoded_when_every_rank_has_answered(ledger: Ledger) -> None:
    composer = Composer(configured(batch={"data_ranks": 2}), ledger)
    admitted(ledger), admitted(ledger)
    batch = composed(composer)
    assert composer.encoded() is None
    end(ledger, batch, 1, JobState.SETTLED)
    assert composer.encoded() is None
    end(ledger, batch, 0, JobState.SETTLED)
    encoded = composer.encoded()
    assert encoded is not None
    assert [rank.file for rank in encoded[1]] == ["rank_0", "rank_1"]


def test_a_step_that_cannot_be_encoded_is_formed_again_and_in_the_end_stops_the_run(ledger: Ledger) -> None:
    composer = Composer(configured(recovery={"max_formations": 2}), ledger)
    groups = [admitted(ledger), admitted(ledger)]
    end(ledger, composed(composer), 0, JobState.DEAD)
    assert composer.encoded() is None
    assert ledger.batches == {}
    assert {group.state for group in groups} == {GroupState.ADMITTED}
    assert {rollout.step for group in groups for rollout in group.rollouts} == {None}
    again = composed(composer)
    assert (again.step, again.formation) == (0, 2)
    end(ledger, again, 0, JobState.DEAD)
    with pytest.raises(RunError, match=r"step 0 could not be encoded in 2 formations.*Nothing is lost"):
        composer.encoded()
