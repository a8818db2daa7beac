"""Batch phase: the final advantages of a step. The result is a file that the job wrote, because a step may be large."""

from collections.abc import Callable
from typing import Any

from headpond.errors import BlobError, RunError, StageError, sentence
from headpond.event_loop.offload import in_io_thread
from headpond.ledger.states import JobState
from headpond.orchestrator.duties import crash_points
from headpond.orchestrator.duties.housekeeping import delete
from headpond.orchestrator.exchange.inputs import step_values
from headpond.orchestrator.ledger.rows import BatchRecord, JobRecord
from headpond.orchestrator.stage import Parts, StepStage
from headpond.records.inputs import StepAdvantages, StepValues
from headpond.store import open_store
from headpond.tasks import inputs
from headpond.tasks.stages import batch_phase
from headpond.tasks.stages.batch_phase import advantages_key, step_credit_key


class BatchPhase(StepStage[batch_phase.BatchPhaseResult]):
    stage = batch_phase.STAGE

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._store = open_store(parts.config.store_url)

    def enter(self, batch: BatchRecord) -> None:
        self._ledger.add_job(batch.batch_phase_id, self.name, str(batch.step))

    def fields(self, job: JobRecord) -> dict[str, Any]:
        batch = self.batch(job)
        return {"step": batch.step, "formation": batch.formation}

    def key(self, job: JobRecord) -> str:
        batch = self.batch(job)
        return inputs.step_key(self._run, batch.step, batch.formation, "values")

    async def inputs(self, job: JobRecord) -> StepValues:
        """In a thread: 12 ms for 2,048 rollouts. Only the caller's task changes an open step."""
        return await in_io_thread(step_values, self.batch(job), self._ledger.state.last_step.estimator_state)

    def reads_besides(self, job: JobRecord) -> tuple[str, str] | tuple[()]:
        """The files that a settled job wrote: the advantages, and those of the turns if there are any."""
        if not isinstance(job.result, batch_phase.BatchPhaseResult):
            return ()
        batch = self.batch(job)
        execution = self._run, batch.step, batch.formation, job.result.execution
        return advantages_key(*execution), step_credit_key(*execution)

    async def take_result(self, job_failed: Callable[[JobRecord, str], None]) -> None:
        """Give the open step its advantages if its batch phase is done. RunError if it cannot be done."""
        for batch in list(self._ledger.batches.values()):
            job = self._ledger.jobs.get(batch.batch_phase_id)
            if job is None:
                continue
            if job.state is JobState.DEAD:
                raise RunError(
                    f"the batch phase of advantages.estimator = {self._config.advantages.estimator!r} failed at step "
                    f"{batch.step}: {sentence(str(job.error))} Fix it, restart the compute workers, then start the run "
                    "again; nothing is lost"
                )
            if not (keys := self.reads_besides(job)):
                continue
            key, credit = keys
            try:
                result = await in_io_thread(inputs.read, self._store, key, StepAdvantages)
                _check(batch, result, credit)
            except (BlobError, StageError, OSError) as error:
                job_failed(job, f"its result cannot be read: {error}")
                continue
            self.estimated(batch, result)
            await self._ledger.committed()
            crash_points.passed("estimated")
            await in_io_thread(delete, self._store, [key])

    def estimated(self, batch: BatchRecord, result: StepAdvantages) -> None:
        """Keep the result and begin the next stage of the step, in one transaction."""
        self._ledger.unwanted_blobs.append(self.key(self._ledger.jobs[batch.batch_phase_id]))
        self._ledger.set_advantages(batch, result.advantages, state=result.state, credit=result.credit)
        self._parts.advance_step(batch)


def _check(batch: BatchRecord, result: StepAdvantages, credit: str) -> None:
    rollouts = {rollout.id for rollout in batch.rollouts()}
    if result.credit not in (None, credit):
        raise StageError(f"it names {result.credit!r}, which is not the file of its execution")
    if result.advantages.keys() != rollouts:
        raise StageError(f"it has advantages of {len(result.advantages)} rollouts, expected the step's {len(rollouts)}")
