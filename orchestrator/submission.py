"""Waiting jobs become messages: plan file, ledger, queue, in this order. The only place that publishes."""

from typing import Any

from orchestrator import crash_points
from orchestrator.broker import Broker
from orchestrator.engine_gate import EngineGate
from orchestrator.ledger import Ledger
from orchestrator.plan_files import PlanFiles
from orchestrator.records import Job
from orchestrator.states import JobKind, JobState
from penstock.config import RunConfig
from penstock.messages import (
    AdvantageJob,
    AnyJob,
    EncodeJob,
    FilterJob,
    Queue,
    RolloutJob,
    ScoreJob,
    SurveyJob,
)
from tasks import envelope

AT_ONCE = 50  # one commit and one command: about 2 ms of the loop


class Submitter:
    def __init__(self, config: RunConfig, run: str, ledger: Ledger, broker: Broker, gate: EngineGate) -> None:
        self._config = config
        self._run = run
        self._ledger = ledger
        self._broker = broker
        self._gate = gate
        self.plan_files = PlanFiles(config, run, ledger)

    async def submit(self, jobs: list[Job]) -> None:
        """Stages before rollouts: finished work moves on before more is begun."""
        stages = [job for job in jobs if job.kind is not JobKind.ROLLOUT]
        for first in range(0, len(stages), AT_ONCE):
            await self._submit_some(stages[first : first + AT_ONCE])
        rollouts = [job for job in jobs if job.kind is JobKind.ROLLOUT]
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
        if not await self.plan_files.ensure(jobs):
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
        match job.kind:
            case JobKind.SURVEY:
                return SurveyJob(**common, environment=job.subject)
            case JobKind.ROLLOUT:
                group, version = self._ledger.groups[job.subject], self._ledger.number("policy_version")
                common |= {"group": group.id, "environment": group.environment, "example": group.example}
                return RolloutJob(**common, seed=self._config.seed, policy_version=version)
            case JobKind.SCORE:
                environment = self._ledger.groups[job.subject].environment
                return ScoreJob(**common, environment=environment, plan=self.plan_files.key(job))
            case JobKind.FILTER:
                return FilterJob(**common, plan=self.plan_files.key(job))
            case JobKind.ADVANTAGE:
                return AdvantageJob(**common, plan=self.plan_files.key(job))
            case JobKind.ENCODE:
                step, data_rank = int(job.subject), int(job.id.rpartition("r")[2])
                return EncodeJob(**common, plan=self.plan_files.key(job), step=step, data_rank=data_rank)

    def _common(self, job: Job) -> dict[str, Any]:
        rollout = job.kind is JobKind.ROLLOUT
        return {
            "run": self._run,
            "job": job.id,
            "attempt": job.attempt,
            "sequence": job.sequence,
            "timeout_s": self._config.rollouts.timeout_s if rollout else self._config.recovery.stage_timeout_s,
        }
