"""Submits waiting jobs: first their input files, then the ledger, then the queue. The only module that publishes."""

import logging
import time
from collections import defaultdict
from typing import Any

from headpond.broker.queues import Queue
from headpond.config import RunConfig
from headpond.event_loop.offload import in_io_thread
from headpond.ledger.states import JobState
from headpond.orchestrator.duties import crash_points
from headpond.orchestrator.duties.housekeeping import Reported, Troubles, delete
from headpond.orchestrator.duties.slices import in_slices
from headpond.orchestrator.exchange.gates import Gate
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import JobRecord
from headpond.orchestrator.pipeline import Pipeline
from headpond.orchestrator.serving.engine_check import EngineCheck
from headpond.orchestrator.workforce.attendance import Attendance
from headpond.store import Store, open_store
from headpond.tasks import envelope, inputs
from headpond.tasks.inputs import Content

logger = logging.getLogger("headpond.submission")

AT_ONCE = 32  # jobs for one commit and one Redis command
LOOKED_AT_AT_ONCE = 4_000  # waiting jobs: about 1 ms. Thousands wait when the engine is away or a run is resumed
MESSAGES_AT_ONCE = 100  # to parse: about 1 ms
READERS_AT_ONCE = 1_000  # jobs: about 1 ms


class Submitter:
    def __init__(
        self,
        config: RunConfig,
        run: str,
        ledger: Ledger,
        broker: Broker,
        pipeline: Pipeline,
        attendance: Attendance,
        engine_check: EngineCheck | None = None,
        troubles: Troubles | None = None,
    ) -> None:
        """`engine_check`: while it is pending, no rollout is submitted."""
        self._engine_check = engine_check or EngineCheck(config)
        self._attendance = attendance
        self._run = run
        self._ledger = ledger
        self._broker = broker
        self._pipeline = pipeline
        self.inputs = InputFiles(config, run, ledger, pipeline, troubles)

    async def remove_leftovers(self) -> None:
        """Remove the queued messages of other runs, which no orchestrator waits for, and the files that none of this
        run's jobs reads: call with the lock held."""
        await self.inputs.remove_unneeded()
        for queue in Queue:
            others = list[bytes]()
            queued = await self._broker.call(lambda client, queue=queue: client.llen(queue))
            # From the side on which messages are added: workers that take some from the other side hide none.
            for first in range(0, queued, MESSAGES_AT_ONCE):
                messages: Any = await self._broker.call(
                    lambda client, queue=queue, first=first: client.lrange(queue, first, first + MESSAGES_AT_ONCE - 1)
                )
                tasks = [(envelope.task_of(message), message) for message in messages]
                others += [message for task, message in tasks if task and task.run != self._run]
            for message in others:
                await self._broker.call(lambda client, queue=queue, message=message: client.lrem(queue, 0, message))  # pyright: ignore
            if others:
                logger.warning("action=leftovers_removed queue=%s messages=%d", queue, len(others))

    async def submit_waiting(self) -> None:
        """Submit every job that waits and is due. Play comes last: begun groups are finished first."""
        now, due = time.monotonic(), defaultdict[str, list[JobRecord]](list)
        async for some in in_slices(list(self._ledger.waiting.values()), LOOKED_AT_AT_ONCE):
            for job in some:
                if job.not_before <= now:
                    due[job.stage].append(job)
        stages = self._pipeline.stages.values()
        for stage in sorted(stages, key=lambda stage: (stage.stage.gate is not None, stage.stage.ends_itself)):
            if not stage.stage.ends_itself or not self._engine_check.pending:
                await self._submit_due(stage.gate, due[stage.name])

    async def _submit_due(self, gate: Gate, jobs: list[JobRecord]) -> None:
        for first in range(0, len(jobs), AT_ONCE):
            if not gate.open:
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
                    messages[job.queue].append(self._encoded(job))
        await self._ledger.committed()
        crash_points.passed("submitted")
        for queue, encoded in messages.items():
            await self._broker.call(lambda client, queue=queue, encoded=encoded: client.lpush(queue, *encoded))
        crash_points.passed("published")
        return bool(messages)

    def _encoded(self, job: JobRecord) -> bytes:
        attendance = self._attendance
        stage = self._pipeline.stage_of(job)
        return envelope.encode(
            stage.stage, stage.message(job), settings=attendance.digest_for(job), failed_by=attendance.listed(job)
        )


class InputFiles:
    """The files that jobs read: written before submission. The pipeline releases those that no job reads again."""

    def __init__(
        self, config: RunConfig, run: str, ledger: Ledger, pipeline: Pipeline, troubles: Troubles | None = None
    ) -> None:
        self._run = run
        self._ledger = ledger
        self._pipeline = pipeline
        self._store = open_store(config.store_url)
        then = "free space or repair it; nothing is lost"
        self.writing = Reported(f"write to the store {self._store}", then, troubles=troubles)

    async def ensure(self, jobs: list[JobRecord]) -> bool:
        """Write the files that `jobs` read. False when the store cannot be written: the jobs wait."""
        readers = {key: job for job in jobs if (key := self._pipeline.stage_of(job).key(job))}
        if not readers:
            return True
        contents = {key: await self._pipeline.stage_of(job).inputs(job) for key, job in readers.items()}
        with self.writing:
            await in_io_thread(_write, self._store, contents)
        return self.writing.text is None

    async def remove_unneeded(self) -> None:
        """Remove the files that an earlier start has left and no job reads. Call before the first job is submitted."""
        needed = set[str]()
        async for some in in_slices(list(self._ledger.jobs.values()), READERS_AT_ONCE):
            needed.update(key for job in some for key in self._pipeline.files_of(job))
        with Reported("list the job inputs"):
            keys = await in_io_thread(inputs.keys, self._store, self._run)
            await in_io_thread(delete, self._store, keys - needed)


def _write(store: Store, contents: dict[str, Content]) -> None:
    for key, content in contents.items():
        inputs.write(store, key, content)
