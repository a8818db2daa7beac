"""Waiting jobs become messages: plan file, ledger, queue, in this order. The only place that publishes."""

import logging
from pathlib import Path
from typing import Any

from orchestrator import crash_points
from orchestrator.broker import Broker
from orchestrator.engine_gate import EngineGate
from orchestrator.ledger import Ledger
from orchestrator.records import Batch, Group, Job
from orchestrator.states import JobState, RolloutState
from penstock import plans
from penstock.config import RunConfig
from penstock.messages import (
    AdvantageJob,
    AnyJob,
    EncodeJob,
    FilterJob,
    GroupMember,
    GroupPlan,
    Queue,
    RolloutJob,
    StepMember,
    StepPlan,
)
from penstock.offload import in_io_thread
from tasks import envelope

logger = logging.getLogger("penstock.submission")

AT_ONCE = 50  # one commit and one command: about 2 ms of the loop


class Submitter:
    def __init__(self, config: RunConfig, run: str, ledger: Ledger, broker: Broker, gate: EngineGate) -> None:
        self._config = config
        self._run = run
        self._ledger = ledger
        self._broker = broker
        self._gate = gate
        self._store = config.store_dir
        self.trouble: str | None = None

    async def submit(self, jobs: list[Job]) -> None:
        """Stages before rollouts: finished work moves on before more is begun."""
        stages = [job for job in jobs if job.queue is not Queue.ROLLOUTS]
        for first in range(0, len(stages), AT_ONCE):
            await self._submit_some(stages[first : first + AT_ONCE])
        rollouts = [job for job in jobs if job.queue is Queue.ROLLOUTS]
        for first in range(0, len(rollouts), AT_ONCE):
            if not self._gate.open:
                await self._submit_scout(rollouts[first:])
                break
            await self._submit_some(rollouts[first : first + AT_ONCE])

    async def _submit_scout(self, jobs: list[Job]) -> None:
        for job in jobs:
            if job.state is JobState.WAITING and self._gate.may_send_scout():
                self._gate.sent_scout(job.id, job.attempt + 1)
                await self._submit_some([job])

    async def _submit_some(self, jobs: list[Job]) -> None:
        if not await self._plans_written(jobs):
            return
        # A late reply may have settled a job while its plan was being written.
        jobs = [job for job in jobs if job.state is JobState.WAITING]
        for job in jobs:
            self._ledger.submit(job)
        messages = [self._message(job) for job in jobs]
        await self._ledger.committed()
        crash_points.passed("submitted")
        for queue in Queue:
            encoded = [envelope.encode(message) for message in messages if message.queue == queue]
            if encoded:
                await self._broker.ask(lambda client, queue=queue, encoded=encoded: client.lpush(queue, *encoded))
        crash_points.passed("published")

    def _message(self, job: Job) -> AnyJob:
        common = self._common(job)
        match job.queue:
            case Queue.ROLLOUTS:
                group, seed = self._ledger.groups[job.subject], self._config.seed
                return RolloutJob(
                    **common, group=group.id, environment=group.environment, example=group.example, seed=seed
                )
            case Queue.FILTERING:
                return FilterJob(**common, plan=plans.group_key(job.subject))
            case Queue.ADVANTAGES:
                return AdvantageJob(**common, plan=plans.group_key(job.subject))
            case Queue.ENCODING:
                batch = self._ledger.batches[int(job.subject)]
                plan, data_rank = plans.step_key(batch.step, batch.formation), int(job.id.rpartition("r")[2])
                return EncodeJob(**common, plan=plan, step=batch.step, data_rank=data_rank)

    def _common(self, job: Job) -> dict[str, Any]:
        rollout = job.queue is Queue.ROLLOUTS
        return {
            "run": self._run,
            "job": job.id,
            "attempt": job.attempt,
            "sequence": job.sequence,
            "timeout_s": self._config.rollouts.timeout_s if rollout else self._config.recovery.stage_timeout_s,
        }

    async def _plans_written(self, jobs: list[Job]) -> bool:
        """False when the store does not take them: the jobs stay waiting and are tried again."""
        wanted = dict(self._plan(job) for job in jobs if job.queue is not Queue.ROLLOUTS)
        if not wanted:
            return True
        try:
            await in_io_thread(write_plans, self._store, wanted)
        except OSError as error:
            self.trouble = f"the store {self._store} cannot be written ({error.strerror}): jobs wait, nothing is lost"
            logger.error("action=store_waits %s", self.trouble)
            return False
        self.trouble = None
        return True

    def _plan(self, job: Job) -> tuple[str, GroupPlan | StepPlan]:
        if job.queue is Queue.ENCODING:
            batch = self._ledger.batches[int(job.subject)]
            return plans.step_key(batch.step, batch.formation), step_plan(batch, self._config.batch.data_ranks)
        return plans.group_key(job.subject), group_plan(self._ledger.groups[job.subject])


def write_plans(store: Path, wanted: dict[str, GroupPlan | StepPlan]) -> None:
    for key, plan in wanted.items():
        plans.write(store, key, plan)


def group_plan(group: Group) -> GroupPlan:
    """All that were generated: a dropped rollout's reward still counts in the baseline."""
    finished = [(rollout.id, rollout.result) for rollout in group.rollouts if rollout.state is not RolloutState.DEAD]
    return GroupPlan(
        group=group.id, members=[GroupMember(rollout=id, result=result) for id, result in finished if result]
    )


def step_plan(batch: Batch, data_ranks: int) -> StepPlan:
    members = [
        StepMember(rollout=rollout.id, group=rollout.group, advantage=rollout.advantage or 0.0, result=rollout.result)
        for rollout in batch.rollouts()
        if rollout.result
    ]
    return StepPlan(step=batch.step, formation=batch.formation, data_ranks=data_ranks, members=members)
