"""How replies change groups, rollouts and jobs."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import configured, pipeline_of, replies_of, reply_to, submitted

from headpond.errors import RunError
from headpond.ledger.states import GroupState, JobState, RolloutState
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.exchange.gates import Gates
from headpond.orchestrator.ledger import restore
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import GroupRecord, JobRecord
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef
from headpond.tasks.stage import Outcome
from headpond.tasks.stages.advantage import AdvantageResult
from headpond.tasks.stages.filter import FilterResult
from headpond.tasks.stages.score import ScoreResult
from headpond.tasks.stages.survey import SurveyResult

DONE, FAILED, RELEASED, UNREACHABLE = Outcome.DONE, Outcome.FAILED, Outcome.RELEASED, Outcome.UNREACHABLE


class Scene:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.troubles = Troubles()
        self.gates = Gates(self.troubles)
        config = configured(recovery={"max_failures": 3})
        self.pipeline = pipeline_of(config, ledger, self.gates)
        self.replies = replies_of(config, ledger, self.pipeline)
        self.group: GroupRecord = submitted(ledger)
        self.rollout = self.group.rollouts[0]
        self.job: JobRecord = ledger.jobs[self.rollout.id]

    def reply(
        self, job: str, outcome: Outcome = DONE, *, result: Any = None, attempt: int = 1, error: str = "it broke"
    ) -> None:
        error_text = None if outcome is DONE else error
        self.replies.apply(reply_to(job, result=result, attempt=attempt, outcome=outcome, error=error_text))

    def finish_rollouts(self) -> None:
        for rollout in self.group.rollouts:
            self.reply(rollout.id, result=RolloutResult(reward=1.0))

    def submit_stage(self, name: str) -> str:
        job = self.ledger.jobs[f"{self.group.id}-{name}"]
        self.ledger.submit(job)
        return job.id

    def states(self) -> list[RolloutState]:
        return [rollout.state for rollout in self.group.rollouts]


@pytest.fixture
def scene(ledger: Ledger) -> Scene:
    return Scene(ledger)


def test_a_group_goes_through_filtering_and_advantages(scene: Scene) -> None:
    scene.finish_rollouts()
    assert scene.group.state == "filter"
    scene.reply(scene.submit_stage("filter"), result=FilterResult(dropped={f"{scene.group.id}-3": "gibberish"}))
    assert scene.group.state == "advantage"
    advantages = {rollout.id: 0.5 for rollout in scene.group.rollouts[:3]}
    scene.reply(scene.submit_stage("advantage"), result=AdvantageResult(advantages=advantages))
    assert scene.group.state == GroupState.ADMITTED
    assert scene.states() == [RolloutState.ADMITTED] * 3 + [RolloutState.FILTERED]
    assert scene.ledger.reasons == {"gibberish": 1}
    assert scene.ledger.jobs == {}


def test_groups_without_a_difference_in_their_advantages_are_told(scene: Scene) -> None:
    for advantage, expected in ((0.0, [True]), (0.5, [True, False])):
        scene.group = scene.group if advantage == 0.0 else submitted(scene.ledger)
        scene.finish_rollouts()
        scene.reply(scene.submit_stage("filter"), result=FilterResult())
        advantages = {rollout.id: advantage for rollout in scene.group.rollouts}
        scene.reply(scene.submit_stage("advantage"), result=AdvantageResult(advantages=advantages))
        assert list(scene.pipeline.causes._flat) == expected


def test_rewards_of_a_group_are_counted_before_it_is_dropped(scene: Scene) -> None:
    for rollout, reward in zip(scene.group.rollouts, (1.0, 0.5, 0.0, 0.25), strict=True):
        scene.reply(rollout.id, result=RolloutResult(reward=reward))
    dropped = {rollout.id: "zero_variance" for rollout in scene.group.rollouts}
    scene.reply(scene.submit_stage("filter"), result=FilterResult(dropped=dropped))
    assert scene.group.state == GroupState.CLOSED
    environment = scene.ledger.state.environments["noop"]
    assert (environment.played, environment.played_reward) == (4, 1.75)


def test_a_masked_rollout_is_admitted_and_stays_masked(scene: Scene) -> None:
    scene.finish_rollouts()
    scene.reply(scene.submit_stage("filter"), result=FilterResult(masked=(scene.rollout.id,)))
    advantages = {rollout.id: 0.5 for rollout in scene.group.rollouts}
    scene.reply(scene.submit_stage("advantage"), result=AdvantageResult(advantages=advantages))
    assert scene.states() == [RolloutState.ADMITTED] * 4
    assert [rollout.masked for rollout in scene.group.rollouts] == [True, False, False, False]


def test_masking_is_in_the_next_commit(scene: Scene, tmp_path: Path) -> None:
    async def commit_twice() -> None:
        scene.finish_rollouts()
        filtering = scene.submit_stage("filter")
        await scene.ledger.committed()
        scene.reply(filtering, result=FilterResult(masked=(scene.rollout.id,)))
        await scene.ledger.committed()

    asyncio.run(commit_twice())
    kept = restore.read(tmp_path / "ledger.sqlite").groups[scene.group.id]
    assert [rollout.masked for rollout in kept.rollouts] == [True, False, False, False]


def test_an_environment_that_scores_groups_gets_a_score_job(scene: Scene) -> None:
    scene.ledger.state.environments["noop"].scores_groups = 1
    scene.finish_rollouts()
    assert scene.group.state == "score"
    job = scene.submit_stage("score")
    scene.reply(job, result=ScoreResult(rewards={scene.rollout.id: 3.0}))
    assert scene.ledger.jobs[job].failures == 1, "it names one rollout of four"
    scene.ledger.submit(scene.ledger.jobs[job])
    rewards = {rollout.id: 3.0 + rollout.index for rollout in scene.group.rollouts}
    scene.reply(job, result=ScoreResult(rewards=rewards), attempt=2)
    assert [rollout.result and rollout.result.reward for rollout in scene.group.rollouts] == [3.0, 4.0, 5.0, 6.0]
    assert scene.group.state == "filter"


def test_a_survey_stores_the_number_of_examples(scene: Scene) -> None:
    scene.ledger.submit(scene.ledger.add_job("e1-noop", "survey", "noop"))
    scene.reply("e1-noop", result=SurveyResult(examples=7, scores_groups=True))
    environment = scene.ledger.state.environments["noop"]
    assert (environment.examples, environment.scores_groups) == (7, True)
    assert "e1-noop" not in scene.ledger.jobs


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("it broke", r"3 failures, the last: it broke\. Fix it"),
        ("did you mean 'Sums'?", r"did you mean 'Sums'\? Fix it"),
    ],
)
def test_a_failed_survey_ends_the_run_and_the_next_start_surveys_again(scene: Scene, error: str, said: str) -> None:
    job = scene.ledger.add_job("e1-noop", "survey", "noop")
    for attempt in (1, 2):
        scene.ledger.submit(job)
        scene.reply(job.id, FAILED, attempt=attempt)
    scene.ledger.submit(job)
    with pytest.raises(RunError, match=rf"'noop' cannot be used: .*{said}, then start"):
        scene.reply(job.id, FAILED, attempt=3, error=error)
    assert job.state is JobState.DEAD
    assert job.id not in scene.ledger.jobs


def test_the_first_good_reply_settles_and_later_ones_are_fenced(scene: Scene) -> None:
    scene.ledger.retry(scene.job)
    scene.ledger.submit(scene.job)
    scene.reply(scene.job.id, result=RolloutResult(reward=1.0), attempt=1)
    assert scene.rollout.state is RolloutState.GENERATED
    scene.reply(scene.job.id, result=RolloutResult(reward=2.0), attempt=2)
    scene.reply(scene.job.id, FAILED, attempt=2)
    assert scene.rollout.result == RolloutResult(reward=1.0)
    assert scene.ledger.state.fenced == 1


def with_files(execution: str) -> RolloutResult:
    columns, experts = (
        BlobRef(key=f"{execution}/{kind}", size=1, checksum="0" * 16) for kind in ("columns", "experts")
    )
    return RolloutResult(reward=1.0, columns=columns, experts=experts)


def test_the_files_of_a_fenced_execution_are_deleted(scene: Scene) -> None:
    scene.reply(scene.job.id, result=with_files("first"))
    scene.reply(scene.job.id, result=with_files("second"), attempt=2)
    assert scene.ledger.unwanted_blobs == ["second/columns", "second/experts"]


def test_a_repeated_reply_does_not_delete_its_own_files(scene: Scene) -> None:
    """A worker writes its reply again when Redis has not confirmed it in time, though it may have arrived."""
    for _ in range(2):
        scene.reply(scene.job.id, result=with_files("first"))
    assert scene.ledger.state.fenced == 1
    assert scene.ledger.unwanted_blobs == []


def test_a_repeated_reply_of_a_closed_group_deletes_nothing(scene: Scene) -> None:
    """As when the stream is read from its start: the files may be in a batch by then."""
    scene.reply(scene.job.id, result=with_files("first"))
    scene.ledger.enter(scene.group, GroupState.CLOSED)
    scene.reply(scene.job.id, result=with_files("first"))
    assert scene.ledger.unwanted_blobs == []


def test_a_good_reply_counts_while_the_job_waits_to_be_submitted_again(scene: Scene) -> None:
    scene.replies.job_lost(scene.job, "the worker's lease expired")
    scene.reply(scene.job.id, result=RolloutResult(reward=1.0))
    assert scene.rollout.state is RolloutState.GENERATED
    assert scene.job.id not in scene.ledger.waiting


def test_a_failure_counts_only_from_the_newest_attempt(scene: Scene) -> None:
    scene.ledger.retry(scene.job)
    scene.ledger.submit(scene.job)
    scene.reply(scene.job.id, FAILED, attempt=1)
    assert (scene.job.state, scene.job.failures) == (JobState.SUBMITTED, 0)
    scene.reply(scene.job.id, FAILED, attempt=2)
    assert (scene.job.state, scene.job.failures) == (JobState.WAITING, 1)


def test_a_rollout_is_dead_with_its_last_error_after_max_failures(scene: Scene) -> None:
    for attempt in (1, 2, 3):
        scene.reply(scene.job.id, FAILED, attempt=attempt)
        if attempt < 3:
            scene.ledger.submit(scene.job)
    assert scene.rollout.state is RolloutState.DEAD
    assert scene.rollout.error == "3 failures, the last: it broke"
    for rollout in scene.group.rollouts[1:]:
        scene.reply(rollout.id, result=RolloutResult(reward=1.0))
    assert scene.group.state == "filter", "three of four are enough"


def test_a_group_with_too_few_rollouts_left_is_dropped(scene: Scene) -> None:
    for rollout in scene.group.rollouts[:3]:
        for attempt in (1, 2, 3):
            scene.reply(rollout.id, FAILED, attempt=attempt)
            if attempt < 3:
                scene.ledger.submit(scene.ledger.jobs[rollout.id])
    assert scene.states() == [RolloutState.DEAD] * 3 + [RolloutState.FILTERED]
    assert scene.ledger.reasons == {"cancelled": 1}
    assert scene.pipeline.play.take_unneeded() == [f"run.{scene.group.rollouts[3].id}.1"]
    assert scene.group.state == GroupState.CLOSED
    assert scene.ledger.state.dropped_in_a_row == 1
    scene.reply(scene.group.rollouts[3].id, result=RolloutResult(reward=1.0))
    assert scene.ledger.state.fenced == 1


def test_an_error_of_the_policy_is_a_result(scene: Scene) -> None:
    scene.reply(scene.job.id, result=RolloutResult(reward=0.0, policy_error="timeout"))
    assert scene.rollout.state is RolloutState.GENERATED


def test_a_released_job_waits_again_and_nothing_is_counted(scene: Scene) -> None:
    scene.reply(scene.job.id, RELEASED)
    assert (scene.job.state, scene.job.failures, scene.job.losses) == (JobState.WAITING, 0, 0)


def test_an_unreachable_engine_closes_the_gate_and_nothing_is_counted(scene: Scene) -> None:
    scene.reply(scene.job.id, UNREACHABLE)
    assert (scene.job.state, scene.job.failures, scene.job.losses) == (JobState.WAITING, 0, 0)
    assert not scene.gates.rollouts.open
    scene.reply(scene.group.rollouts[1].id, result=RolloutResult(reward=1.0))
    assert scene.gates.rollouts.open


def test_an_unwritable_store_closes_the_gate_like_an_engine(scene: Scene) -> None:
    scene.reply(scene.job.id, Outcome.UNWRITTEN)
    assert (scene.job.state, scene.job.failures) == (JobState.WAITING, 0)
    (trouble,) = scene.troubles.texts()
    assert re.search(r"cannot write to the store: .*\(it broke\); .*1 s", trouble)
    encoding = scene.ledger.add_job("s000000f1r0", "encode", "0")
    scene.ledger.submit(encoding)
    scene.reply(encoding.id, Outcome.UNWRITTEN)
    assert (encoding.state, encoding.failures) == (JobState.WAITING, 0)
    assert not scene.gates.all["encoding"].open


def test_a_reply_that_does_not_answer_its_job_is_a_failure(scene: Scene) -> None:
    scene.reply(scene.job.id, result=FilterResult())
    assert (scene.job.state, scene.job.failures) == (JobState.WAITING, 1)
    assert scene.job.error == "the reply does not answer the job"
    scene.ledger.submit(scene.job)
    scene.finish_rollouts()
    scene.reply(scene.submit_stage("filter"), result=FilterResult())
    advantages = scene.submit_stage("advantage")
    scene.reply(advantages, result=AdvantageResult(advantages={scene.rollout.id: 1.0}))
    assert scene.ledger.jobs[advantages].failures == 1


def test_a_group_without_variance_is_dropped_for_that_reason(scene: Scene) -> None:
    scene.finish_rollouts()
    scene.reply(scene.submit_stage("filter"), result=FilterResult())
    scene.reply(scene.submit_stage("advantage"), result=AdvantageResult(dropped="zero_variance"))
    assert scene.states() == [RolloutState.FILTERED] * 4
    assert scene.ledger.reasons == {"zero_variance": 4}
    assert "zero_variance 4 (all with the reward 1)" in scene.pipeline.causes.explain()


def test_a_dead_stage_job_closes_its_group(scene: Scene) -> None:
    scene.finish_rollouts()
    job = scene.submit_stage("filter")
    for attempt in (1, 2, 3):
        scene.reply(job, FAILED, attempt=attempt)
        if attempt < 3:
            scene.ledger.submit(scene.ledger.jobs[job])
    assert scene.states() == [RolloutState.DEAD] * 4
    assert scene.group.state == GroupState.CLOSED


def test_a_reply_to_an_unknown_job_changes_nothing(scene: Scene) -> None:
    before = dict(scene.ledger.states)
    for outcome in Outcome:
        scene.reply("g0000099-0", outcome, result=RolloutResult(reward=1.0) if outcome is DONE else None)
    assert dict(scene.ledger.states) == before
    assert scene.ledger.state.fenced == 1
    assert {job.stage for job in scene.ledger.jobs.values()} == {"play"}


def test_a_filtering_job_that_cannot_sync_waits_for_the_store(scene: Scene) -> None:
    scene.finish_rollouts()
    job = scene.ledger.jobs[scene.submit_stage("filter")]
    scene.reply(job.id, Outcome.UNWRITTEN)
    assert (job.state, job.failures) == (JobState.WAITING, 0)
    assert ["cannot write to the store" in trouble for trouble in scene.troubles.texts()] == [True]
    scene.ledger.submit(job)
    scene.reply(job.id, result=FilterResult(), attempt=2)
    assert scene.troubles.texts() == []
