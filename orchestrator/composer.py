"""Admitted groups become steps, one open step at a time, in the order of planning; groups are never split."""

import logging

from orchestrator.ledger import Ledger
from orchestrator.records import Batch, Group
from orchestrator.states import GroupState, JobState, RolloutState
from penstock.config import RunConfig
from penstock.errors import RunError
from penstock.messages import EncodeResult, Queue

logger = logging.getLogger("penstock.composer")


class Composer:
    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._config = config
        self._ledger = ledger

    def compose(self) -> Batch | None:
        """Form the next step if there is enough; its encoding jobs are created in the same transaction."""
        step = self._ledger.number("steps_delivered")
        if self._ledger.batches or step >= self._config.steps:
            return None
        groups = self._take()
        if groups is None:
            return None
        batch = self._ledger.compose(step, groups)
        for data_rank in range(self._config.batch.data_ranks):
            self._ledger.add_job(batch.job_id(data_rank), Queue.ENCODING, str(step))
        return batch

    def encoded(self) -> tuple[Batch, list[EncodeResult]] | None:
        """The open step whose every rank has replied."""
        for batch in self._ledger.batches.values():
            jobs = [self._ledger.jobs[batch.job_id(rank)] for rank in range(self._config.batch.data_ranks)]
            if any(job.state is JobState.DEAD for job in jobs):
                self._form_again(batch, next(job.error for job in jobs if job.state is JobState.DEAD))
                return None
            if all(job.state is JobState.SETTLED for job in jobs):
                return batch, [EncodeResult.model_validate_json(job.result or "") for job in jobs]
        return None

    def _form_again(self, batch: Batch, error: str | None) -> None:
        if batch.formation >= self._config.recovery.max_formations:
            raise RunError(
                f"step {batch.step} could not be encoded in {batch.formation} formations, the last error: {error}. "
                "Nothing is lost: mend the cause and start the run again"
            )
        logger.warning("action=step_formed_again step=%d formation=%d error=%s", batch.step, batch.formation, error)
        self._ledger.event(f"step {batch.step}", "formed_again", error or "")
        self._ledger.dissolve(batch)

    def _take(self) -> list[Group] | None:
        taken: list[Group] = []
        weight = 0
        for group in self._ledger.groups.values():
            if group.state is GroupState.ADMITTED:
                taken.append(group)
                weight += 1 if self._config.batch.unit == "groups" else len(group.of(RolloutState.ADMITTED))
                if weight >= self._config.batch.size:
                    return sorted(taken, key=lambda group: group.ordinal)
        return None
