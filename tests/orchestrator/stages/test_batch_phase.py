"""A step's batch phase: the job's input, the stage that computes it, and the result that the orchestrator takes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import admitted, configured, pipeline_of, replies_of, reply_to

from headpond.errors import RunError
from headpond.ledger.states import JobState
from headpond.orchestrator.ledger import restore
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import BatchRecord, JobRecord
from headpond.orchestrator.planning.composer import Composer
from headpond.orchestrator.submission import InputFiles
from headpond.orchestrator.trainer import Trainer
from headpond.records.inputs import StepAdvantages, StepValues
from headpond.records.rollout import RolloutResult
from headpond.store import open_store
from headpond.tasks import inputs
from headpond.tasks.stage import Call, Outcome
from headpond.tasks.stages import batch_phase
from headpond.tasks.stages.batch_phase import BatchPhaseMessage, BatchPhaseResult

KEY = "plans/run.step_000000.1.advantages.e1.json"


class Scene:
    """One composed step of two groups, with its batch phase submitted."""

    def __init__(self, ledger: Ledger, directory: Path, **settings: Any) -> None:
        self.config = configured(
            store=f"file://{directory}", advantages={"estimator": "reinforce_pp"},
            trainer={"max_steps_ahead": "unlimited"}, **settings,
        )  # fmt: skip
        self.ledger, self.store = ledger, directory
        for group in (admitted(ledger), admitted(ledger)):
            for rollout in group.rollouts:
                rollout.result = RolloutResult(
                    reward=rollout.index / 4, rewards={"right": 1.0}, agents={"white": 3}, completion_tokens=10
                )
        self.pipeline = pipeline_of(self.config, ledger, batch_phase=True)
        self.replies = replies_of(self.config, ledger, self.pipeline)
        self.composer = Composer(self.config, ledger, Trainer(self.config, ledger), self.pipeline)
        self.inputs = InputFiles(self.config, "run", ledger, self.pipeline)
        batch = self.composer.compose()
        assert batch is not None
        self.batch: BatchRecord = batch

    @property
    def job(self) -> JobRecord:
        return self.ledger.jobs[self.batch.batch_phase_id]

    @property
    def key(self) -> str:
        return self.pipeline.batch_phase.key(self.job)

    def submit(self) -> None:
        assert asyncio.run(self.inputs.ensure([self.job]))
        self.ledger.submit(self.job)

    def reply(self, **fields: Any) -> None:
        values: dict[str, Any] = {"result": BatchPhaseResult(execution="e1")} | fields
        self.replies.apply(reply_to(self.job.id, attempt=self.job.attempt, execution="e1", **values))

    def take(self) -> None:
        asyncio.run(self.pipeline.batch_phase.take_result(self.replies.job_failed))

    def compute(self) -> BatchPhaseResult:
        message = BatchPhaseMessage(
            run="run", job=self.job.id, attempt=1, sequence=1, timeout_s=1, plan=self.key, step=0,
            formation=1,
        )  # fmt: skip
        return batch_phase.estimate(Call(message=message, execution="e1", config=self.config))


@pytest.fixture
def scene(ledger: Ledger, tmp_path: Path) -> Scene:
    scene = Scene(ledger, tmp_path)
    scene.submit()
    return scene


def test_the_job_reads_the_rollouts_of_its_step_and_its_result_is_encoded(scene: Scene) -> None:
    values = inputs.read(open_store(scene.config.store_url), scene.key, StepValues)
    assert values.rollouts == sorted(rollout.id for rollout in scene.batch.rollouts())
    assert (values.rewards[:4], values.examples[::4], values.environments[0]) == ([0, 0.25, 0.5, 0.75], [0, 1], "noop")
    assert (values.named_rewards[0], values.agents[0], values.state) == ({"right": 1.0}, {"white": 3}, None)
    assert scene.compute() == BatchPhaseResult(execution="e1")
    scene.reply()
    assert scene.composer.encoded() is None
    scene.take()
    advantages = list(scene.batch.advantages.values())
    assert sum(advantages) == pytest.approx(0, abs=1e-5)
    assert advantages[:4] == sorted(set(advantages[:4]))
    assert [job.id for job in scene.ledger.waiting.values()] == ["s000000f1r0"]
    assert not (scene.store / KEY).exists()


@pytest.mark.parametrize("content", [None, b"{", StepAdvantages(advantages={"g0000001-0": 1.0}, state=None)])
def test_a_result_that_cannot_be_read_is_computed_again(scene: Scene, content: Any) -> None:
    path = scene.store / KEY
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.model_dump_json().encode())
    scene.reply()
    scene.take()
    assert (scene.job.state, scene.job.failures, scene.batch.advantages) == (JobState.WAITING, 1, {})
    assert "its result cannot be read" in (scene.job.error or "")


def test_a_batch_phase_that_keeps_failing_stops_the_run_with_its_error(scene: Scene) -> None:
    for _ in range(3):
        scene.reply(outcome=Outcome.FAILED, result=None, error="StageError: KeyError: 'x' (/mine.py, line 3)")
        if scene.job.state is JobState.WAITING:
            scene.ledger.submit(scene.job)
    with pytest.raises(RunError, match=r"'reinforce_pp' .*step 0: .*mine.py, line 3\)"):
        scene.take()


def test_a_settled_batch_phase_is_taken_after_a_restart(scene: Scene, ledger: Ledger, tmp_path: Path) -> None:
    scene.compute()
    scene.reply()
    asyncio.run(ledger.committed())
    restored = restore.read(tmp_path / "ledger.sqlite")
    job = restored.jobs[scene.batch.batch_phase_id]
    assert (job.state, job.result) == (JobState.SETTLED, BatchPhaseResult(execution="e1"))
    asyncio.run(InputFiles(scene.config, "run", ledger, scene.pipeline).remove_unneeded())
    assert (tmp_path / KEY).exists(), "a new orchestrator deletes only what is not needed"


def test_advantages_and_state_of_an_open_step_survive_a_restart(scene: Scene, ledger: Ledger, tmp_path: Path) -> None:
    advantages = dict.fromkeys((rollout.id for rollout in scene.batch.rollouts()), 0.5)
    scene.pipeline.batch_phase.estimated(scene.batch, StepAdvantages(advantages=advantages, state='{"b": 1}'))
    asyncio.run(ledger.committed())
    restored = restore.read(tmp_path / "ledger.sqlite")
    batch = restored.batches[0]
    assert (batch.advantages, batch.estimator_state) == (advantages, '{"b": 1}')
    assert scene.batch.batch_phase_id not in restored.jobs
    ledger.deliver(scene.batch)
    asyncio.run(ledger.committed())
    assert restore.read(tmp_path / "ledger.sqlite").state.last_step.estimator_state == '{"b": 1}'
