"""Submits waiting jobs: first their input files, then the ledger, then the queue. The only module that publishes."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from headpond.config import RunConfig
from headpond.ids import EncodeJobId, RolloutId
from headpond.ledger.states import JobKind, JobState
from headpond.messages import (
    AdvantageJob,
    AnyJob,
    BatchPhaseJob,
    DrawJob,
    EncodeJob,
    FilterJob,
    Queue,
    RolloutJob,
    ScoreJob,
    SurveyJob,
)
from headpond.orchestrator import crash_points, envelope
from headpond.orchestrator.broker import Broker
from headpond.orchestrator.gates import Gate, Gates
from headpond.orchestrator.inputs import JobInputs
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.records import JobRecord
from headpond.orchestrator.slices import in_slices
from headpond.orchestrator.workforce.attendance import Attendance

logger = logging.getLogger("headpond.submission")

GATED = (JobKind.FILTER, JobKind.BATCH_PHASE, JobKind.ENCODE, JobKind.EVALUATION, JobKind.ROLLOUT)
PLAYED = (JobKind.EVALUATION, JobKind.ROLLOUT)
UNGATED = tuple(kind for kind in JobKind if kind not in GATED)
AT_ONCE = 32  # jobs for one commit and one Redis command
LOOKED_AT_AT_ONCE = 4_000  # waiting jobs: about 1 ms. Thousands wait when the engine is away or a run is resumed
MESSAGES_AT_ONCE = 100  # to parse: about 1 ms


class Submitter:
    def __init__(
        self,
        config: RunConfig,
        run: str,
        ledger: Ledger,
        broker: Broker,
        gates: Gates,
        attendance: Attendance,
        *,
        least_version: Callable[[], int] = lambda: 0,
        abandoned_versions: Callable[[], tuple[int, ...]] = lambda: (),
        may_play: Callable[[], bool] = lambda: True,
    ) -> None:
        """`least_version` and `abandoned_versions`: which weights may serve a job that is submitted now. `may_play`:
        whether the engine is known to be usable."""
        self._least_version = least_version
        self._abandoned_versions = abandoned_versions
        self._may_play = may_play
        self._attendance = attendance
        self._config = config
        self._run = run
        self._ledger = ledger
        self._broker = broker
        self._gates = gates
        self.inputs = JobInputs(config, run, ledger)

    async def remove_leftovers(self) -> None:
        """Remove the queued messages of other runs, which no orchestrator waits for: call with the lock held."""
        for queue in Queue:
            others = await self._messages_of_others(queue)
            for message in others:
                await self._broker.call(lambda client, queue=queue, message=message: _remove(client, queue, message))
            if others:
                logger.warning("action=leftovers_removed queue=%s messages=%d", queue, len(others))

    async def _messages_of_others(self, queue: Queue) -> list[bytes]:
        """Read from the side on which messages are added: workers that take some from the other side hide none."""
        others: list[bytes] = []
        for first in range(0, await self._broker.call(lambda client: client.llen(queue)), MESSAGES_AT_ONCE):
            messages: Any = await self._broker.call(
                lambda client, first=first: client.lrange(queue, first, first + MESSAGES_AT_ONCE - 1)
            )
            others += [message for message in messages if (task := envelope.task_of(message)) and task.run != self._run]
        return others

    async def submit_waiting(self) -> None:
        """Submit every job that waits and is due. Stages before rollouts: groups are finished before others begin."""
        now, due = time.monotonic(), defaultdict[JobKind, list[JobRecord]](list)
        async for some in in_slices(list(self._ledger.waiting.values()), LOOKED_AT_AT_ONCE):
            for job in some:
                if job.not_before <= now:
                    due[job.kind].append(job)
        await self._submit_kinds([job for kind in UNGATED for job in due[kind]])
        for kind in GATED:
            if kind not in PLAYED or self._may_play():
                await self._submit_kinds(due[kind])

    async def _submit_kinds(self, jobs: list[JobRecord]) -> None:
        gate = self._gates.of(jobs[0].kind) if jobs else None
        for first in range(0, len(jobs), AT_ONCE):
            if gate and not gate.open:
                await self._submit_probe(gate, jobs[first:])
                break
            await self._submit_some(jobs[first : first + AT_ONCE])

    async def _submit_probe(self, gate: Gate, jobs: list[JobRecord]) -> None:
        for job in jobs:
            if not gate.may_send_probe():
                break
            if job.state is JobState.WAITING:
                gate.probe_sent(job.id, job.attempt + 1)
                if not await self._submit_some([job]):
                    gate.probe_lost(job.id)
                    break

    async def _submit_some(self, jobs: list[JobRecord]) -> bool:
        """Whether any was submitted. A late reply may settle a job while it waits here."""
        jobs = [job for job in jobs if job.state is JobState.WAITING]
        if not await self.inputs.ensure(jobs):
            return False
        messages = defaultdict[Queue, list[bytes]](list)
        async for some in in_slices(jobs):
            for job in some:
                if job.state is JobState.WAITING:
                    self._ledger.submit(job)
                    messages[job.kind.queue].append(self._encoded(job))
        await self._ledger.committed()
        crash_points.passed("submitted")
        for queue, encoded in messages.items():
            await self._broker.call(lambda client, queue=queue, encoded=encoded: client.lpush(queue, *encoded))
        crash_points.passed("published")
        return bool(messages)

    def _encoded(self, job: JobRecord) -> bytes:
        attendance = self._attendance
        return envelope.encode(
            self._message(job), settings=attendance.digest_for(job), failed_by=attendance.listed(job)
        )

    def _message(self, job: JobRecord) -> AnyJob:
        common = self._common(job)
        match job.kind:
            case JobKind.SURVEY:
                return SurveyJob(**common, environment=job.subject)
            case JobKind.ROLLOUT:
                group = self._ledger.groups[job.subject]
                common |= {"group": group.id, "environment": group.environment, "example": group.example}
                return RolloutJob(**common, **self._weights(), seed=self._config.seed)
            case JobKind.EVALUATION:
                evaluation = self._ledger.evaluations[int(job.subject)]
                id = RolloutId.parse(job.id)
                example = id.number // evaluation.rollouts
                common |= {"group": id.group, "environment": evaluation.name, "example": example}
                return RolloutJob(**common, **self._weights(), seed=self._config.seed)
            case JobKind.SCORE:
                environment = self._ledger.groups[job.subject].environment
                return ScoreJob(**common, environment=environment, plan=self.inputs.key(job))
            case JobKind.EVALUATION_SCORE:
                environment = self._ledger.evaluations[int(job.subject)].name
                return ScoreJob(**common, environment=environment, plan=self.inputs.key(job))
            case JobKind.FILTER:
                return FilterJob(**common, plan=self.inputs.key(job))
            case JobKind.ADVANTAGE:
                return AdvantageJob(**common, plan=self.inputs.key(job))
            case JobKind.DRAW:
                return DrawJob(**common, environment=job.subject, plan=self.inputs.key(job))
            case JobKind.BATCH_PHASE:
                batch = self._ledger.batches[int(job.subject)]
                return BatchPhaseJob(**common, plan=self.inputs.key(job), step=batch.step, formation=batch.formation)
            case JobKind.ENCODE:
                step, data_rank = int(job.subject), EncodeJobId.parse(job.id).data_rank
                return EncodeJob(**common, plan=self.inputs.key(job), step=step, data_rank=data_rank)

    def _weights(self) -> dict[str, Any]:
        return {
            "policy_version": self._ledger.number("policy_version"),
            "least_version": self._least_version(),
            "abandoned_versions": self._abandoned_versions(),
        }

    def _common(self, job: JobRecord) -> dict[str, Any]:
        return {
            "run": self._run,
            "job": job.id,
            "attempt": job.attempt,
            "sequence": job.sequence,
            "timeout_s": timeout_s(self._config, job.kind),
        }


def timeout_s(config: RunConfig, kind: JobKind) -> float:
    return config.rollouts.timeout_s if kind in PLAYED else config.recovery.stage_timeout_s


async def _remove(client: Any, queue: Queue, message: bytes) -> None:
    await client.lrem(queue, 0, message)
