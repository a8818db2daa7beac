"""The order of the stages, and a stage of another name in it."""

import dataclasses

import pytest
from support.ledgers import configured, generated, pipeline_of, replies_of, reply_to

from headpond.errors import RunError
from headpond.ledger.states import GroupState
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import GroupRecord
from headpond.orchestrator.pipeline import Pipeline
from headpond.orchestrator.stage import GroupStage, Parts
from headpond.records.wire import Result
from headpond.tasks.stage import all_stages
from headpond.tasks.stages.filter import FilterResult


class CheckResult(Result):
    passed: bool


CHECK = dataclasses.replace(all_stages()["filter"], name="check", task="headpond.filtering.check", result=CheckResult)


class Check(GroupStage[CheckResult]):
    stage = CHECK

    def apply(self, group: GroupRecord, result: CheckResult) -> str | None:
        return None if result.passed else "check"


@pytest.fixture
def pipeline(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """With the stage `check` between filter and advantage."""
    monkeypatch.setitem(all_stages(), "check", CHECK)
    pipeline = pipeline_of(configured(), ledger)
    filtering = pipeline.stages["filter"]
    parts: Parts = filtering._parts  # pyright: ignore[reportPrivateUsage]
    *before, advantage = pipeline.of_group
    monkeypatch.setattr(pipeline, "of_group", (*before, Check(parts), advantage))
    monkeypatch.setitem(pipeline.stages, "check", Check(parts))
    return pipeline


def settle(pipeline: Pipeline, ledger: Ledger, group: GroupRecord, result: Result) -> None:
    job = ledger.jobs[f"{group.id}-{group.state}"]
    ledger.submit(job)
    replies_of(configured(), ledger, pipeline).apply(reply_to(job.id, result=result))


def test_a_run_with_jobs_of_an_unknown_stage_is_refused(pipeline: Pipeline, ledger: Ledger) -> None:
    group = generated(ledger)
    ledger.enter(group, "check")
    ledger.add_job(f"{group.id}-check", "check", group.id)
    with pytest.raises(RunError, match="stage check"):
        pipeline_of(configured(), ledger)


def test_a_group_is_scored_only_if_its_environment_scores_groups(ledger: Ledger) -> None:
    pipeline, (first, second) = pipeline_of(configured(), ledger), (generated(ledger), generated(ledger))
    pipeline.advance(first)
    ledger.state.environments["noop"].scores_groups = 1
    pipeline.advance(second)
    assert (first.state, second.state) == ("filter", "score")
    assert {job.id for job in ledger.waiting.values()} == {f"{first.id}-filter", f"{second.id}-score"}


def test_a_group_passes_another_stage(pipeline: Pipeline, ledger: Ledger) -> None:
    group = generated(ledger)
    pipeline.advance(group)
    settle(pipeline, ledger, group, FilterResult())
    assert group.state == "check"
    settle(pipeline, ledger, group, CheckResult(passed=True))
    assert group.state == "advantage"


def test_another_stage_drops_a_group_with_its_reason(pipeline: Pipeline, ledger: Ledger) -> None:
    group = generated(ledger)
    pipeline.advance(group)
    settle(pipeline, ledger, group, FilterResult())
    settle(pipeline, ledger, group, CheckResult(passed=False))
    assert group.state == GroupState.CLOSED
    assert ledger.reasons == {"check": 4}
