"""A step's batch phase: the job's input, the stage that computes it, and the result that the orchestrator takes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import admitted, configured, unattended

from headpond import job_inputs
from headpond.errors import RunError
from headpond.ledger.states import JobState
from headpond.messages import BatchPhaseJob, BatchPhaseResult, Outcome, Reply, RolloutResult, StepAdvantages
from headpond.orchestrator.composer import BatchPhase, Composer
from headpond.orchestrator.gates import Gates
from headpond.orchestrator.groups import Groups
from headpond.orchestrator.inputs import JobInputs
from headpond.orchestrator.ledger import restore
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.records import BatchRecord, JobRecord
from headpond.orchestrator.trainer import Trainer
from headpond.store import open_store
from headpond.tasks.jobs import batch_body

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
        self.groups = Groups(self.config, ledger, Gates(), unattended(self.config))
        self.composer = Composer(self.config, ledger, Trainer(self.config, ledger), batch_phase=True)
        self.inputs = JobInputs(self.config, "run", ledger)
        self.batch_phase = BatchPhase(self.config, ledger, self.inputs, self.composer, self.groups)
        batch = self.composer.compose()
        assert batch is not None
        self.batch: BatchRecord = batch

    @property
    def job(self) -> JobRecord:
        return self.ledger.jobs[self.batch.batch_phase_id]

    def submit(self) -> None:
        assert asyncio.run(self.inputs.ensure([self.job]))
        self.ledger.submit(self.job)

    def reply(self, **fields: Any) -> None:
        values: dict[str, Any] = {"outcome": Outcome.DONE, "result": BatchPhaseResult(execution="e1")} | fields
        self.groups.apply(
            Reply(
                run="run",
                job=self.job.id,
                attempt=self.job.attempt,
                execution="e1",
                worker="w-1",
                node="n",
                settings="",
                **values,
            )
        )

    def take(self) -> None:
        asyncio.run(self.batch_phase.take_result())

    def message(self) -> BatchPhaseJob:
        return BatchPhaseJob(
            run="run", job=self.job.id, attempt=1, sequence=1, timeout_s=1, plan=self.inputs.key(self.job), step=0,
            formation=1,
        )  # fmt: skip


@pytest.fixture
def scene(ledger: Ledger, tmp_path: Path) -> Scene:
    scene = Scene(ledger, tmp_path)
    scene.submit()
    return scene


def test_the_job_reads_the_rollouts_of_its_step_and_its_result_is_encoded(scene: Scene) -> None:
    values = job_inputs.read_values(open_store(scene.config.store_url), scene.inputs.key(scene.job))
    assert values.rollouts == sorted(rollout.id for rollout in scene.batch.rollouts())
    assert (values.rewards[:4], values.examples[::4], values.environments[0]) == ([0, 0.25, 0.5, 0.75], [0, 1], "noop")
    assert (values.named_rewards[0], values.agents[0], values.state) == ({"right": 1.0}, {"white": 3}, None)
    assert batch_body(scene.message(), scene.config, "e1") == BatchPhaseResult(execution="e1")
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
    batch_body(scene.message(), scene.config, "e1")
    scene.reply()
    asyncio.run(ledger.committed())
    restored = restore.read(tmp_path / "ledger.sqlite")
    job = restored.jobs[scene.batch.batch_phase_id]
    assert (job.state, job.result) == (JobState.SETTLED, BatchPhaseResult(execution="e1"))
    assert asyncio.run(JobInputs(scene.config, "run", ledger).ensure([scene.job]))
    assert (tmp_path / KEY).exists(), "a new orchestrator deletes only what is not needed"


def test_advantages_and_state_of_an_open_step_survive_a_restart(scene: Scene, ledger: Ledger, tmp_path: Path) -> None:
    advantages = dict.fromkeys((rollout.id for rollout in scene.batch.rollouts()), 0.5)
    scene.composer.estimated(scene.batch, StepAdvantages(advantages=advantages, state='{"b": 1}'))
    asyncio.run(ledger.committed())
    restored = restore.read(tmp_path / "ledger.sqlite")
    batch = restored.batches[0]
    assert (batch.advantages, batch.estimator_state) == (advantages, '{"b": 1}')
    assert scene.batch.batch_phase_id not in restored.jobs
    ledger.deliver(scene.batch)
    asyncio.run(ledger.committed())
    assert restore.read(tmp_path / "ledger.sqlite").meta["estimator_state"] == '{"b": 1}'
