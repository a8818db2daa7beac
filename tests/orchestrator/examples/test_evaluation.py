"""When evaluations begin, what they count, and what a resumed run has of them."""

import asyncio
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import admitted, configured, pipeline_of, replies_of, reply_to
from support.waiting import Clock

from headpond.batches.signals import PublishedPolicy, write_policy
from headpond.config import RunConfig
from headpond.ledger import queries
from headpond.ledger.pages import Filter, rollouts_page
from headpond.ledger.schema import reading
from headpond.ledger.state_rows import RunState
from headpond.ledger.states import RolloutState
from headpond.ledger.waterfall import Waterfall
from headpond.orchestrator.endings.causes import Causes
from headpond.orchestrator.examples.evaluation import AT_ONCE, Evaluations, unreported
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import JobRecord
from headpond.orchestrator.planning.composer import Composer
from headpond.orchestrator.release import sort_out
from headpond.orchestrator.trainer import Trainer
from headpond.records.inputs import GroupInputs
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef
from headpond.tasks.inputs import key as inputs_key
from headpond.tasks.stage import Outcome
from headpond.tasks.stages.score import ScoreResult

FIRST = [f"g000000{group}-{number}" for group in (1, 2, 3) for number in (0, 1)]
"""the rollouts of the first evaluation: two of each of three examples"""


class Scene:
    def __init__(self, ledger: Ledger, **settings: Any) -> None:
        self.ledger = ledger
        filters = settings.pop("filters", {})
        self.config: RunConfig = configured(
            rollouts={"max_in_flight": 40},
            recovery={"max_failures": 1},
            filters=filters,
            evaluation={"held_out": {"use": "noop", "every": 5, "examples": 3, "rollouts": 2} | settings},
        )
        self.pipeline = pipeline_of(self.config, ledger)
        self.replies = replies_of(self.config, ledger, self.pipeline)
        self.evaluations: Evaluations = self.pipeline.evaluations
        ledger.state.environments["held_out"].examples = 10

    def jobs(self) -> list[JobRecord]:
        return [job for job in self.ledger.jobs.values() if job.stage == "play"]

    def plan(self, version: int = 0) -> list[str]:
        """The rollouts that begin at this version."""
        self.ledger.state.policy_version = version
        before = {job.id for job in self.jobs()}
        while self.evaluations.plan():
            pass
        return [job.id for job in self.jobs() if job.id not in before]

    def reply(self, job: JobRecord, outcome: Outcome = Outcome.DONE, **result: Any) -> None:
        if job.id in self.ledger.waiting:
            self.ledger.submit(job)
        done = RolloutResult(**{"reward": 1.0} | result) if outcome is Outcome.DONE else None
        error = None if done else "it broke"
        self.replies.apply(reply_to(job.id, result=done, attempt=job.attempt, outcome=outcome, error=error))

    def cancel(self) -> None:
        self.evaluations.cancel(self.evaluations.open, "the run has ended")

    def finish(self) -> None:
        for job in self.jobs():
            self.reply(job)

    @property
    def last(self) -> dict[str, Any]:
        return self.evaluations.status()["names"]["held_out"]["last"]

    @property
    def counts(self) -> dict[str, Any]:
        return self.evaluations.status()["rollouts"]


@pytest.fixture
def scene(ledger: Ledger) -> Scene:
    return Scene(ledger)


def test_every_few_versions_the_same_examples_are_played(scene: Scene) -> None:
    assert scene.plan() == FIRST
    assert [(group.environment, group.example) for group in scene.ledger.groups.values()] == [
        ("held_out", 0), ("held_out", 1), ("held_out", 2)]  # fmt: skip
    assert scene.plan(5) == []  # the first is still running
    scene.finish()
    assert len(scene.plan(6)) == 6
    scene.finish()
    assert scene.plan(9) == []
    assert len(scene.plan(23)) == 6
    assert scene.evaluations.status()["names"]["held_out"]["running"] == {"version": 23, "settled": 0, "of": 6}


def test_rewards_and_metrics_of_any_size_have_a_mean(scene: Scene) -> None:
    scene.plan()
    for number, job in enumerate(scene.jobs()):
        scene.reply(job, reward=3e200 * (number == 0), metrics={"size": 1.5e308})
    assert scene.last["reward_mean"] == 5e199
    assert scene.last["reward_std"] == pytest.approx(5e199 * 5**0.5, rel=1e-5)
    assert scene.last["metrics/size"] == pytest.approx(1.5e308)


def test_the_first_version_is_left_out_if_the_setting_says_so(ledger: Ledger) -> None:
    scene = Scene(ledger, at_start=False)
    assert scene.plan(2) == []
    assert scene.plan(4) == []
    assert len(scene.plan(5)) == 6


def test_versions_are_evaluated_again_when_a_trainer_resumes_from_an_older_checkpoint(scene: Scene) -> None:
    for version in (0, 5, 10):
        assert scene.plan(version)
        scene.finish()
    assert scene.plan(7) == []
    assert scene.plan(9) == []
    assert len(scene.plan(10)) == 6


def test_nothing_begins_before_the_survey_nor_when_the_run_is_ending(scene: Scene) -> None:
    scene.ledger.state.environments["held_out"].examples = 0
    assert scene.plan() == []
    scene.ledger.state.environments["held_out"].examples = 10
    assert scene.evaluations.plan(ending=True) is False
    assert not scene.jobs()


@pytest.mark.parametrize(("examples", "rollouts"), [(4, 4), ("all", 10), (99, 10)])
def test_no_more_examples_are_played_than_there_are(ledger: Ledger, examples: Any, rollouts: int) -> None:
    scene = Scene(ledger, examples=examples, rollouts=1)
    assert len(scene.plan()) == rollouts


def test_its_share_of_the_rollouts_in_flight_is_bounded(ledger: Ledger) -> None:
    scene = Scene(ledger, examples="all", rollouts=5, share=0.25)
    scene.plan()
    assert len(scene.jobs()) == 10
    for job in scene.jobs()[:5]:
        scene.reply(job)
    scene.plan()
    assert len(scene.jobs()) == 10
    assert scene.counts == {
        "planned": 15, "evaluated": 5, "dead": 0, "cancelled": 0, "in_flight": 10, "balanced": True,
    }  # fmt: skip


def test_an_example_with_more_rollouts_than_the_share_is_played_alone(ledger: Ledger) -> None:
    scene = Scene(ledger, rollouts=12, share=0.25)
    scene.plan()
    assert len(scene.jobs()) == 12


def test_a_large_evaluation_begins_in_small_pieces(ledger: Ledger) -> None:
    scene = Scene(ledger, examples="all", rollouts=8, share=1.0)
    assert scene.evaluations.plan()
    assert len(scene.jobs()) == AT_ONCE
    assert not scene.evaluations.plan()
    assert len(scene.jobs()) == 40


def test_its_status_looks_at_no_group_of_training(scene: Scene) -> None:
    """It is made every second, with 20,000 open groups."""
    scene.plan()
    for job in scene.jobs()[:2]:
        scene.reply(job)
    before, groups = scene.evaluations.status(), scene.ledger.groups
    scene.ledger.groups = {}
    assert scene.evaluations.status() == before
    assert scene.counts["in_flight"] == 4
    scene.ledger.groups = groups
    scene.finish()
    assert not scene.ledger.evaluation_groups


def test_no_count_of_training_includes_an_evaluation(scene: Scene) -> None:
    """A rollout dies, one is scored, and the others are cancelled while they are played."""
    ledger = scene.ledger
    before = ledger.state.totals()
    scene.plan()
    first, second, *_ = scene.jobs()
    scene.reply(first, Outcome.FAILED)
    scene.reply(second, columns=columns(second), experts=columns(second), completion_tokens=7)
    scene.cancel()
    assert not any(ledger.states[state] for state in RolloutState)
    assert not ledger.reasons
    assert not +ledger.admitted
    assert not +ledger.unfinished
    assert scene.pipeline.causes.recent() == Causes().recent()
    since = RunState.increase(ledger.state.totals(), before)
    assert not any(since.rollout_counts[name].by_name for name in ("states", "reasons"))
    assert list(since.stages) == ["evaluation"]
    assert not since.environments
    named = {"groups_planned": 3, "sequence": 2}  # these count what is named or sent, whatever it is for
    counts = {row.name: getattr(ledger.state, row.name) for row in fields(ledger.state)}
    assert {name: number for name, number in counts.items() if isinstance(number, int) and number} == named


def test_an_evaluation_poisons_no_example_and_stops_no_run(scene: Scene) -> None:
    """However often its rollouts die of one error: in training, the run would stop."""
    for version in range(0, 100, 5):
        scene.plan(version)
        for job in scene.jobs():
            scene.reply(job, Outcome.FAILED)
    assert scene.counts["dead"] == 120
    assert scene.ledger.state.dropped_in_a_row == 0
    environment = scene.ledger.state.environments["held_out"]
    assert (scene.ledger.state.last_death, environment.deaths, environment.quarantined) == (None, {}, {})


def test_a_rollout_of_an_evaluation_is_never_stale_nor_timed_out(ledger: Ledger) -> None:
    scene = Scene(ledger, filters={"stale": {"mode": "drop", "max_off_policy_steps": 1}})
    scene.plan()
    ledger.state.steps_delivered = 20
    ledger.state.policy_version = 20
    for job in scene.jobs():
        ledger.submit(job)
        assert not scene.pipeline.play.seen_running(job, 0)
    composer = Composer(scene.config, ledger, Trainer(scene.config, ledger), scene.pipeline)
    asyncio.run(composer.drop_stale())
    for job in scene.jobs():
        scene.reply(job, version_first=0, version_last=0)
    asyncio.run(composer.drop_stale())
    assert (scene.last["rollouts"], scene.last["dead"]) == (6, 0)


def test_no_step_is_composed_of_an_evaluation(scene: Scene) -> None:
    ledger, config = scene.ledger, scene.config
    composer = Composer(config, ledger, Trainer(config, ledger), scene.pipeline)
    ledger.state.environments["noop"].examples = 10
    scene.plan()
    *jobs, last = scene.jobs()
    for job in jobs:
        scene.reply(job)
    assert composer.compose() is None
    groups = [admitted(ledger), admitted(ledger)]
    batch = composer.compose()
    assert batch is not None
    assert batch.groups == groups
    scene.reply(last)
    ledger.deliver(batch)
    assert (scene.last["rollouts"], +ledger.states) == (6, {RolloutState.DELIVERED: 8})


def test_values_are_means_over_rollouts_and_examples(scene: Scene) -> None:
    scene.plan(7)
    results = [(1.0, 7, 7), (0.0, 7, 8), (0.0, 8, 8), (0.0, 8, 9), (0.5, 8, 8), (1.5, 8, 8)]
    for job, (reward, first, last) in zip(scene.jobs(), results, strict=True):
        scene.reply(
            job, reward=reward, version_first=first, version_last=last, completion_tokens=10, truncated=reward == 0.5,
            metrics={"hints": reward}, rewards={"right": 2 * reward},
        )  # fmt: skip
    last = scene.last
    assert (last["version"], last["version_first"], last["version_last"]) == (7, 7, 9)
    assert (last["examples"], last["rollouts"], last["dead"]) == (3, 6, 0)
    assert (last["reward_mean"], last["rewards/right"], last["metrics/hints"]) == (0.5, 1.0, 0.5)
    assert last["reward_std"] == pytest.approx(0.57735, abs=1e-5)
    assert last["solved_rate"] == pytest.approx(2 / 6, abs=1e-6)
    assert last["solved_any_rate"] == pytest.approx(2 / 3, abs=1e-6)
    assert (last["completion_tokens"], last["policy_error_rate"]) == (10, 0)
    assert last["truncated_rate"] == pytest.approx(1 / 6, abs=1e-6)
    values = unreported(scene.ledger)
    assert values["evaluation/held_out/reward_mean"] == 0.5
    assert unreported(scene.ledger) == {}


def test_the_files_of_a_group_are_deleted_when_its_scores_are_in(scene: Scene) -> None:
    scene.plan()
    first, second, *_ = scene.jobs()
    scene.reply(first, columns=columns(first))
    assert not scene.ledger.unwanted_blobs
    scene.reply(second, columns=columns(second))
    inputs = inputs_key("run", "g0000001")
    assert scene.ledger.unwanted_blobs == [columns(first).key, columns(second).key, inputs]
    late = BlobRef(key=f"rollouts/run/{first.id}/2.y/columns.safetensors", size=3, checksum="")
    scene.reply(first, columns=late)
    assert scene.ledger.unwanted_blobs[3:] == [late.key]
    assert scene.counts["evaluated"] == 2


def test_an_evaluation_ends_without_rollouts_that_died(scene: Scene) -> None:
    scene.plan()
    for job in scene.jobs()[:2]:
        scene.reply(job, Outcome.FAILED)
    scene.finish()
    assert (scene.last["rollouts"], scene.last["dead"], scene.last["reward_mean"]) == (4, 2, 1.0)
    scene.plan(5)
    for job in scene.jobs():
        scene.reply(job, Outcome.FAILED)
    assert (scene.last["rollouts"], scene.last["dead"]) == (0, 6)
    assert "reward_mean" not in scene.last
    assert scene.counts["dead"] == 8
    assert scene.counts["balanced"]


def columns(job: JobRecord) -> BlobRef:
    return BlobRef(key=f"rollouts/run/{job.id}/1.x/columns.safetensors", size=3, checksum="")


def score_jobs(scene: Scene) -> list[JobRecord]:
    return [job for job in scene.ledger.jobs.values() if job.stage == "score"]


def inputs_of(scene: Scene, job: JobRecord) -> GroupInputs:
    content = asyncio.run(scene.pipeline.stage_of(job).inputs(job))
    assert isinstance(content, GroupInputs)
    return content


def score(scene: Scene, job: JobRecord, **rewards: float) -> None:
    scene.ledger.submit(job)
    named = {rollout.replace("_", "-"): reward for rollout, reward in rewards.items()}
    scene.replies.apply(reply_to(job.id, result=ScoreResult(rewards=named)))


def test_the_rollouts_of_an_example_are_scored_together_by_an_environment_that_scores_groups(scene: Scene) -> None:
    scene.ledger.state.environments["held_out"].scores_groups = True
    scene.plan()
    jobs = scene.jobs()
    for job in (jobs[2], jobs[1], jobs[3]):
        scene.reply(job, columns=columns(job))
    scene.reply(jobs[0], Outcome.FAILED)  # the other rollout of the first example is scored alone
    assert [job.id for job in score_jobs(scene)] == ["g0000002-score", "g0000001-score"]
    assert not scene.ledger.unwanted_blobs
    second, first = score_jobs(scene)
    inputs = inputs_of(scene, second)
    assert (inputs.environment, inputs.example) == ("held_out", 1)
    assert list(inputs.members) == ["g0000002-0", "g0000002-1"]
    assert list(inputs_of(scene, first).members) == ["g0000001-1"]
    score(scene, first, g0000001_1=0.25)
    score(scene, second, g0000002_0=0.5, g0000002_1=0.75)
    unwanted = sorted(key for key in scene.ledger.unwanted_blobs if key.startswith("rollouts/"))
    assert unwanted == sorted(columns(job).key for job in jobs[1:4])
    for job in jobs[4:]:
        scene.reply(job)
    score(scene, score_jobs(scene)[0], g0000003_0=1.0, g0000003_1=0.0)
    assert (scene.last["rollouts"], scene.last["dead"], scene.last["reward_mean"]) == (5, 1, 0.5)
    assert scene.counts["balanced"]


def test_rollouts_whose_score_failed_are_dead(scene: Scene) -> None:
    scene.ledger.state.environments["held_out"].scores_groups = True
    scene.plan()
    scene.finish()
    for job in score_jobs(scene):
        scene.reply(job, Outcome.FAILED)
    assert (scene.last["rollouts"], scene.last["dead"]) == (0, 6)
    assert scene.counts == {
        "planned": 6, "evaluated": 0, "dead": 6, "cancelled": 0, "in_flight": 0, "balanced": True,
    }  # fmt: skip


def test_a_score_without_every_rollout_does_not_answer(scene: Scene) -> None:
    scene.ledger.state.environments["held_out"].scores_groups = True
    scene.plan()
    scene.finish()
    score(scene, score_jobs(scene)[0], g0000001_0=1.0)
    assert scene.counts["dead"] == 2  # max_failures is 1


def test_a_resumed_run_has_the_results_that_wait_for_their_score(tmp_path: Path) -> None:
    path = tmp_path / "killed.sqlite"

    async def begin() -> None:
        ledger = Ledger(path)
        scene = Scene(ledger)
        ledger.state.environments["held_out"].scores_groups = True
        scene.plan()
        for job in scene.jobs()[:3]:
            scene.reply(job, columns=columns(job))
        await ledger.committed()
        ledger.close()

    asyncio.run(begin())
    ledger = Ledger(path)
    scene = Scene(ledger)
    (job,) = score_jobs(scene)
    assert list(inputs_of(scene, job).members) == ["g0000001-0", "g0000001-1"]
    found = sort_out([*FIRST, "g0000004-0"], ledger.groups)
    assert (found.settled, found.closed) == (FIRST[:3], ["g0000004-0"])
    files = [f"rollouts/run/{rollout}/1.x/columns.safetensors" for rollout in FIRST[:3]]
    assert found.named == set(files)
    scene.cancel()
    assert sorted(ledger.unwanted_blobs) == files
    assert not ledger.jobs
    assert scene.counts["cancelled"] == 6
    ledger.close()


def test_a_resumed_run_has_the_open_evaluation_with_its_scores(tmp_path: Path) -> None:
    path = tmp_path / "killed.sqlite"

    async def begin() -> None:
        ledger = Ledger(path)
        scene = Scene(ledger)
        scene.plan(5)
        first, second, *_ = scene.jobs()
        scene.reply(first, reward=4.0)
        scene.reply(second, Outcome.FAILED)
        await ledger.committed()
        ledger.close()

    asyncio.run(begin())
    ledger = Ledger(path)
    scene = Scene(ledger)
    scene.evaluations.resume()
    assert [job.id for job in scene.jobs()] == FIRST[2:]
    assert scene.counts["balanced"]
    scene.finish()
    assert (scene.last["version"], scene.last["rollouts"], scene.last["dead"]) == (5, 5, 1)
    assert scene.last["reward_mean"] == pytest.approx(8 / 5)
    assert scene.plan(9) == []
    ledger.close()


def test_an_evaluation_that_is_not_configured_any_more_is_cancelled(scene: Scene) -> None:
    scene.plan()
    for job in scene.jobs()[:3]:  # one example is done
        scene.reply(job)
    others = Evaluations(configured(evaluation={"another": {"use": "noop"}}), scene.ledger)
    others.resume()
    assert not scene.jobs()
    assert not scene.ledger.groups
    assert scene.counts == {
        "planned": 6, "evaluated": 2, "dead": 0, "cancelled": 4, "in_flight": 0, "balanced": True,
    }  # fmt: skip
    assert scene.last is None


def test_the_end_of_a_run_waits_for_open_evaluations(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("headpond.orchestrator.examples.evaluation.time.monotonic", lambda: clock.now)
    assert not scene.evaluations.awaited_at_end()
    scene.plan()
    assert scene.evaluations.awaited_at_end()
    clock.now += 599
    assert scene.evaluations.awaited_at_end()
    clock.now += 2
    assert not scene.evaluations.awaited_at_end()
    scene.cancel()
    assert scene.counts["cancelled"] == 6


def test_an_update_of_the_weights_is_held_until_the_evaluations_of_this_version_end(
    ledger: Ledger, tmp_path: Path
) -> None:
    scene = Scene(ledger, hold_s=60.0)
    config = configured(run_dir=tmp_path, engine={"weight_update": "headpond"})
    trainer = Trainer(config, ledger, holds_update=scene.evaluations.holds_update)
    write_policy(tmp_path, PublishedPolicy(version=1, weights="/weights/1"))
    asyncio.run(trainer.read())
    jobs = scene.jobs()
    assert [job.id for job in jobs] == FIRST
    for job in jobs:
        assert (trainer.state.policy, ledger.state.policy_version) == (None, 0)
        scene.reply(job)
        asyncio.run(trainer.read())
    assert trainer.state.policy == PublishedPolicy(version=1, weights="/weights/1")
    assert ledger.state.policy_version == 1


def test_no_update_is_held_for_longer_than_the_setting(ledger: Ledger) -> None:
    scene = Scene(ledger, hold_s=0.0)
    assert not scene.evaluations.holds_update()
    assert len(scene.jobs()) == 6


def test_the_ledger_keeps_the_rewards_of_closed_evaluations_and_finds_rollouts_without_a_job(tmp_path: Path) -> None:
    path = tmp_path / "kept.sqlite"
    lost = "g0000005-1"

    async def play() -> None:
        ledger = Ledger(path)
        scene = Scene(ledger)
        scene.plan()
        scene.reply(scene.jobs()[0], Outcome.FAILED)
        scene.finish()
        scene.plan(5)
        ledger.jobs.pop(lost)
        ledger.waiting.pop(lost)
        for changed in [
            key
            for key, (table, record) in ledger._changed.items()
            if table == "jobs" and record.id == lost  # type: ignore[union-attr]
        ]:
            ledger._changed.pop(changed)
        await ledger.committed()
        ledger.close()

    asyncio.run(play())
    with reading(path) as connection:
        closed = connection.execute("SELECT id, state, reason, reward FROM all_rollouts WHERE state = 'evaluated'")
        assert closed.fetchall() == [(FIRST[0], "evaluated", "dead", None)] + [
            (rollout, "evaluated", None, 1.0) for rollout in FIRST[1:]
        ]
        assert queries.counted(connection) == queries.kept_counts(connection)
        assert queries.counted(connection).evaluation == {"planned": 12, "dead": 1, "evaluated": 5}
        assert list(queries.structure_problems(connection, limit=5)) == [f"rollout {lost} is open and has no job"]
        stages = Waterfall().read(connection)["stages"]
        assert [stage["rollouts"] for stage in stages] == [0] * len(stages)
        page = rollouts_page(connection, Filter(state=RolloutState.EVALUATED))
        assert [row["id"] for row in page.rows] == FIRST[::-1]
