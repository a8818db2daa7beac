"""Applies replies. A result goes to its stage, a late reply is fenced. Every other outcome retries or kills the job.

Every method is one ledger transaction: the effects of a reply and the jobs that follow are committed together.
"""

import logging

from headpond.config import RunConfig
from headpond.ledger.states import JobState
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.replica_costs import ReplicaCosts
from headpond.orchestrator.ledger.rows import JobRecord
from headpond.orchestrator.pipeline import Pipeline
from headpond.orchestrator.workforce.attendance import Attendance
from headpond.tasks.stage import Outcome, Reply, Subject

logger = logging.getLogger("headpond.replies")


class Replies:
    def __init__(self, config: RunConfig, ledger: Ledger, pipeline: Pipeline, attendance: Attendance) -> None:
        self._config = config
        self._ledger = ledger
        self._pipeline = pipeline
        self._attendance = attendance
        self.replica_costs = ReplicaCosts(config, ledger)

    def apply(self, reply: Reply) -> None:
        """The first good reply of any attempt settles its job; a failure counts only from the newest attempt."""
        self.replica_costs.count(reply.replica_uses)
        job = self._ledger.jobs.get(reply.job)
        if job is None or job.state is JobState.SETTLED:
            self._fence(reply)
            return
        newest = job.state is JobState.SUBMITTED and reply.attempt == job.attempt
        if not self._attendance.uses(reply, job):
            self._fence(reply)
            if newest:
                self._give_back(job, reply)
            return
        self._attendance.note(reply)
        stage = self._pipeline.stage_of(job)
        gate, result = stage.gate, reply.result
        if reply.outcome in (Outcome.DONE, Outcome.FAILED):
            gate.reopen()
        error = reply.error or "the reply does not answer the job"
        match reply.outcome:
            case Outcome.DONE if result and reply.stage == stage.stage.name and stage.fits(job, result):
                self._ledger.state.stages[self._ledger.kind(job)].settle(reply.duration_s)
                self._ledger.end(job, JobState.SETTLED, result=result)
                stage.settled(job, result, reply)
                if job.subject_kind is Subject.ENVIRONMENT:
                    self._ledger.unwanted_blobs += self._pipeline.files_of(job)
            case Outcome.RELEASED if newest:
                gate.probe_lost(job.id)
                self._ledger.event(job.id, "released", f"attempt {reply.attempt} by {reply.worker}")
                self._ledger.retry(job)
            case Outcome.DECLINED if newest:
                self._give_back(job, reply)
            case Outcome.UNREACHABLE | Outcome.UNWRITTEN if newest and stage.stage.gate:
                self._attendance.blames_job(job, reply.node)
                if self._attendance.is_excluded(reply.node):
                    gate.probe_lost(job.id)
                else:
                    gate.close(reply.outcome, job.id, reply.attempt, error, node=reply.node)
                self._ledger.retry(job, error=error)
            case _ if newest:
                self.job_failed(job, error, node=reply.node)
            case _:
                pass

    def job_failed(self, job: JobRecord, error: str, *, node: str | None = None) -> None:
        """Retry the job. The failure counts when no other worker is left to try."""
        counts = self._attendance.blames_job(job, node)
        self._ledger.event(job.id, "failed", f"attempt {job.attempt}{f' on {node}' if node else ''}: {error}")
        self._ledger.retry(job, error=error, failures=int(counts))
        if job.failures >= self._config.recovery.max_failures:
            self._kill(job, f"{job.failures} failures, the last: {error}", error)

    def job_lost(self, job: JobRecord, why: str) -> None:
        self._pipeline.stage_of(job).gate.probe_lost(job.id)
        self._ledger.event(job.id, "lost", f"attempt {job.attempt}: {why}")
        self._ledger.retry(job, error=why, losses=1)
        if job.losses >= self._config.recovery.max_losses:
            self._kill(job, f"lost {job.losses} times, the last: {why}", why)

    def _give_back(self, job: JobRecord, reply: Reply) -> None:
        self._pipeline.stage_of(job).gate.probe_lost(job.id)
        self._ledger.event(job.id, "declined", f"attempt {reply.attempt} by {reply.node}")
        self._attendance.give_back(job)
        self._ledger.retry(job)

    def _fence(self, reply: Reply) -> None:
        if reply.outcome is Outcome.DONE:
            self._ledger.state.fenced += 1
        if stage := self._pipeline.stages.get(reply.stage):
            stage.fenced(reply)

    def _kill(self, job: JobRecord, why: str, error: str) -> None:
        """`why` has the number of its failures, `error` is the last one."""
        logger.error("action=dead job=%s %s", job.id, why)
        self._ledger.event(job.id, "dead", why)
        self._ledger.end(job, JobState.DEAD)
        self._pipeline.stage_of(job).died(job, why, error)
