"""Takes the results of the estimator's batch phase: files that the jobs wrote, because a step may be large."""

from orchestrator import crash_points
from orchestrator.composer import Composer
from orchestrator.groups import Groups
from orchestrator.inputs import JobInputs
from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.records import BatchRecord
from orchestrator.release import delete
from penstock import job_inputs
from penstock.config import RunConfig
from penstock.errors import BlobError, RunError, StageError
from penstock.ledger.states import JobState
from penstock.messages import StepAdvantages
from penstock.runtime.offload import in_io_thread
from penstock.store import open_store


class BatchPhase:
    def __init__(
        self, config: RunConfig, ledger: Ledger, inputs: JobInputs, composer: Composer, groups: Groups
    ) -> None:
        self._estimator = config.advantages.estimator
        self._store = open_store(config.store_url)
        self._inputs = inputs
        self._ledger = ledger
        self._composer = composer
        self._groups = groups

    async def take_result(self) -> None:
        """Give the open step its advantages if its batch phase is done. RunError if it cannot be done."""
        for batch in list(self._ledger.batches.values()):
            job = self._ledger.jobs.get(batch.batch_phase_id)
            if job is None:
                continue
            if job.state is JobState.DEAD:
                raise RunError(
                    f"the batch phase of advantages.estimator = {self._estimator!r} failed at step {batch.step}: "
                    f"{job.error}. Fix it, restart the compute workers, then start the run again; nothing is lost"
                )
            key = self._inputs.result_key(job)
            if key is None:
                continue
            try:
                result = await in_io_thread(job_inputs.read_advantages, self._store, key)
                _check(batch, result, self._inputs.credit_key(job))
            except (BlobError, StageError, OSError) as error:
                self._groups.job_failed(job, f"its result cannot be read: {error}")
                continue
            self._inputs.adopt(result.credit)
            self._composer.estimated(batch, result)
            await self._ledger.committed()
            crash_points.passed("estimated")
            await in_io_thread(delete, self._store, [key])


def _check(batch: BatchRecord, result: StepAdvantages, credit: str | None) -> None:
    if result.credit not in (None, credit):
        raise StageError(f"it names {result.credit!r}, which is not the file of its execution")
    if result.advantages.keys() != {rollout.id for rollout in batch.rollouts()}:
        raise StageError(f"it has advantages of {len(result.advantages)} other rollouts than the step's")
