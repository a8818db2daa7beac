"""What follows from a reply: a rollout settles, its group goes through filtering and advantages, a step is encoded.

Every method is one ledger transaction: what a reply changes and the jobs that follow from it are committed together.
"""

import logging

from orchestrator.engine_gate import EngineGate
from orchestrator.ledger import Ledger
from orchestrator.records import Group, Job, Rollout
from orchestrator.states import GroupState, JobState, RolloutState
from penstock.config import RunConfig
from penstock.messages import (
    AdvantageResult,
    EncodeResult,
    FilterResult,
    Outcome,
    Queue,
    Reply,
    Result,
    RolloutResult,
)

logger = logging.getLogger("penstock.stages")

SETTLED = frozenset({RolloutState.GENERATED, RolloutState.DEAD})


class Stages:
    def __init__(self, config: RunConfig, ledger: Ledger, gate: EngineGate) -> None:
        self._config = config
        self._ledger = ledger
        self._gate = gate

    def apply(self, reply: Reply) -> None:
        """The first good reply of any attempt settles its job; a failure counts only from the newest attempt."""
        job = self._ledger.jobs.get(reply.job)
        if job is None or job.state is JobState.SETTLED:
            self._ledger.count("fenced", reply.outcome is Outcome.DONE)
            return
        if job.queue is Queue.ROLLOUTS and reply.outcome in (Outcome.DONE, Outcome.FAILED):
            self._gate.reached()
        newest = job.state is JobState.SUBMITTED and reply.attempt == job.attempt
        error = reply.error or "the reply does not answer the job"
        match reply.outcome:
            case Outcome.DONE if reply.result is not None and self._fits(job, reply.result):
                self._settle(job, reply.result)
            case Outcome.RELEASED if newest:
                self._gate.scout_lost(job.id)
                self._ledger.event(job.id, "released", f"attempt {reply.attempt} by {reply.worker}")
                self._ledger.wait(job)
            case Outcome.UNREACHABLE if newest:
                self._gate.unreachable(job.id, reply.attempt, error)
                self._ledger.wait(job, error=error)
            case Outcome.DONE | Outcome.FAILED if newest:
                self.failed(job, error)
            case _:
                pass

    def _fits(self, job: Job, result: Result) -> bool:
        """Whether `result` answers `job`: a worker of another version, or a custom stage, may be wrong."""
        if isinstance(result, AdvantageResult) and job.queue is Queue.ADVANTAGES and not result.dropped:
            left = self._ledger.groups[job.subject].of(RolloutState.GENERATED)
            return result.advantages.keys() >= {rollout.id for rollout in left}
        return result.queue == job.queue

    def failed(self, job: Job, error: str) -> None:
        self._ledger.event(job.id, "failed", f"attempt {job.attempt}: {error}")
        self._ledger.wait(job, error=error, failures=1)
        if job.failures >= self._config.recovery.max_failures:
            self._die(job, f"{job.failures} failures, the last: {error}")

    def lost(self, job: Job, why: str) -> None:
        self._gate.scout_lost(job.id)
        self._ledger.event(job.id, "lost", f"attempt {job.attempt}: {why}")
        self._ledger.wait(job, error=why, losses=1)
        if job.losses >= self._config.recovery.max_losses:
            self._die(job, f"lost {job.losses} times, the last: {why}")

    def _settle(self, job: Job, result: Result) -> None:
        kept = result.model_dump_json() if isinstance(result, EncodeResult) else None
        group = self._ledger.groups.get(job.subject)
        rollout = self._ledger.rollout(job) if job.queue is Queue.ROLLOUTS else None
        self._ledger.end(job, JobState.SETTLED, result=kept)
        match result:
            case RolloutResult():
                assert group is not None
                assert rollout is not None
                self._ledger.generated(rollout, result)
                self._collect(group)
            case FilterResult():
                assert group is not None
                self._filtered(group, result)
            case AdvantageResult():
                assert group is not None
                self._estimated(group, result)
            case EncodeResult():
                pass

    def _die(self, job: Job, why: str) -> None:
        logger.error("action=dead job=%s %s", job.id, why)
        self._ledger.event(job.id, "dead", why)
        if job.queue is Queue.ENCODING:
            self._ledger.end(job, JobState.DEAD)  # the composer forms the step again
            return
        group = self._ledger.groups[job.subject]
        lost = [self._ledger.rollout(job)] if job.queue is Queue.ROLLOUTS else group.of(RolloutState.GENERATED)
        self._ledger.end(job, JobState.DEAD)
        for rollout in lost:
            self._ledger.move(rollout, RolloutState.DEAD, error=why)
        if job.queue is Queue.ROLLOUTS:
            self._collect(group)
        else:
            self._drop(group, [], "dead")

    def _collect(self, group: Group) -> None:
        if group.state is not GroupState.COLLECTING or len(group.of(*SETTLED)) < len(group.rollouts):
            return
        finished = group.of(RolloutState.GENERATED)
        if len(finished) < self._config.rollouts.smallest_group:
            self._drop(group, finished, "group_too_small")
            return
        self._ledger.enter(group, GroupState.FILTERING)
        self._ledger.add_job(f"{group.id}-filter", Queue.FILTERING, group.id)

    def _filtered(self, group: Group, result: FilterResult) -> None:
        for rollout in group.of(RolloutState.GENERATED):
            if rollout.id in result.dropped:
                self._ledger.move(rollout, RolloutState.FILTERED, reason=result.dropped[rollout.id])
        if not group.of(RolloutState.GENERATED):
            self._drop(group, [], "filtered")
            return
        self._ledger.enter(group, GroupState.ESTIMATING)
        self._ledger.add_job(f"{group.id}-advantages", Queue.ADVANTAGES, group.id)

    def _estimated(self, group: Group, result: AdvantageResult) -> None:
        left = group.of(RolloutState.GENERATED)
        if result.dropped:
            self._drop(group, left, result.dropped)
            return
        for rollout in left:
            rollout.advantage = result.advantages[rollout.id]
            self._ledger.move(rollout, RolloutState.ADMITTED)
        self._ledger.enter(group, GroupState.ADMITTED)
        self._ledger.set("dropped_in_a_row", 0)

    def _drop(self, group: Group, rollouts: list[Rollout], reason: str) -> None:
        """The planner replaces it."""
        for rollout in rollouts:
            self._ledger.move(rollout, RolloutState.FILTERED, reason=reason)
        self._ledger.event(group.id, "dropped", reason)
        self._ledger.count("dropped_in_a_row")
        self._ledger.enter(group, GroupState.CLOSED)
