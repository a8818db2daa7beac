"""Encode: one job for each data rank of a step. When all are done, the step is sealed."""

from collections.abc import Iterable
from typing import Any

from headpond.batches import BatchPlan
from headpond.event_loop.offload import in_io_thread
from headpond.ids import EncodeJobId
from headpond.orchestrator.exchange.inputs import batch_plan
from headpond.orchestrator.ledger.rows import BatchRecord, JobRecord
from headpond.orchestrator.stage import StepStage
from headpond.tasks import inputs
from headpond.tasks.stages import encode


class Encode(StepStage[encode.EncodeResult]):
    stage = encode.STAGE

    def enter(self, batch: BatchRecord) -> None:
        for data_rank in range(self._config.batch.data_ranks):
            self._ledger.add_job(batch.job_id(data_rank), self.name, str(batch.step))

    def fields(self, job: JobRecord) -> dict[str, Any]:
        return {"step": int(job.subject), "data_rank": EncodeJobId.parse(job.id).data_rank}

    def key(self, job: JobRecord) -> str:
        batch = self.batch(job)
        return inputs.step_key(self._run, batch.step, batch.formation)

    async def inputs(self, job: JobRecord) -> BatchPlan:
        """In a thread: 12 ms for 2,048 rollouts. Only the caller's task changes an open step."""
        return await in_io_thread(batch_plan, self._config, self.batch(job))

    def reads_besides(self, job: JobRecord) -> Iterable[str]:
        credit = self.batch(job).credit
        return [credit] if credit else []

    def fits(self, job: JobRecord, result: encode.EncodeResult) -> bool:
        return result.rank is not None or bool(result.unreadable)

    def jobs(self, batch: BatchRecord) -> list[JobRecord]:
        """The jobs of its ranks that the ledger has."""
        ids = (batch.job_id(data_rank) for data_rank in range(self._config.batch.data_ranks))
        return [job for id in ids if (job := self._ledger.jobs.get(id))]

    def results(self, batch: BatchRecord) -> list[encode.EncodeResult]:
        """The results so far, in the order of the ranks."""
        return [job.result for job in self.jobs(batch) if isinstance(job.result, encode.EncodeResult)]
