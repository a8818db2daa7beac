"""Applies replies: a rollout settles; its group is scored, filtered, estimated and admitted; a rank is encoded.

Every method is one ledger transaction: the effects of a reply and the jobs that follow are committed together.
"""

import logging
from collections import Counter

from headpond import ids
from headpond.batches.credit import credit_key
from headpond.config import RunConfig
from headpond.errors import RunError, sentence
from headpond.ledger.states import UNGENERATED, GroupState, JobKind, JobState, RolloutState
from headpond.messages import (
    AdvantageResult,
    AnyResult,
    BatchPhaseResult,
    DrawResult,
    EncodeResult,
    FilterResult,
    Outcome,
    Reply,
    RolloutResult,
    ScoreResult,
    StepResult,
    SurveyResult,
)
from headpond.orchestrator.causes import CANCELLED, TOO_SMALL, Causes, masking
from headpond.orchestrator.examples.choice import Examples
from headpond.orchestrator.examples.evaluation import Evaluations
from headpond.orchestrator.gates import Gates
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.records import GroupRecord, JobRecord, RolloutRecord
from headpond.orchestrator.ledger.replica_costs import ReplicaCosts
from headpond.orchestrator.workforce.attendance import Attendance

logger = logging.getLogger("headpond.groups")


class Groups:
    def __init__(self, config: RunConfig, ledger: Ledger, gates: Gates, attendance: Attendance) -> None:
        self._config = config
        self._ledger = ledger
        self._gates = gates
        self.causes = Causes()
        self._examples = Examples(config, ledger)
        self.evaluations = Evaluations(config, ledger)
        self._attendance = attendance
        self.replica_costs = ReplicaCosts(config, ledger)
        self.cancelled: list[JobRecord] = []
        """submitted jobs that are no longer needed: revoking them saves work"""

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
        gate = self._gates.of(job.kind)
        if gate and reply.outcome in (Outcome.DONE, Outcome.FAILED):
            gate.reopen()
        error = reply.error or "the reply does not answer the job"
        match reply.outcome:
            case Outcome.DONE if reply.result is not None and self._fits(job, reply.result):
                self._ledger.add_duration(job.kind, reply.duration_s)
                self._settle(job, reply, reply.result)
            case Outcome.RELEASED if newest:
                self._gates.probe_lost(job.kind, job.id)
                self._ledger.event(job.id, "released", f"attempt {reply.attempt} by {reply.worker}")
                self._ledger.retry(job)
            case Outcome.DECLINED if newest:
                self._give_back(job, reply)
            case Outcome.UNREACHABLE | Outcome.UNWRITTEN if newest and gate:
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
        """It counts for the job unless another worker may do better."""
        counts = self._attendance.blames_job(job, node)
        self._ledger.event(job.id, "failed", f"attempt {job.attempt}{f' on {node}' if node else ''}: {error}")
        self._ledger.retry(job, error=error, failures=int(counts))
        if job.failures >= self._config.recovery.max_failures:
            self._kill(job, f"{job.failures} failures, the last: {error}", error)

    def _give_back(self, job: JobRecord, reply: Reply) -> None:
        self._gates.probe_lost(job.kind, job.id)
        self._ledger.event(job.id, "declined", f"attempt {reply.attempt} by {reply.node}")
        self._attendance.give_back(job)
        self._ledger.retry(job)

    def job_lost(self, job: JobRecord, why: str) -> None:
        self._gates.probe_lost(job.kind, job.id)
        self._ledger.event(job.id, "lost", f"attempt {job.attempt}: {why}")
        self._ledger.retry(job, error=why, losses=1)
        if job.losses >= self._config.recovery.max_losses:
            self._kill(job, f"lost {job.losses} times, the last: {why}", why)

    def stop_waiting(self, group: GroupRecord) -> None:
        """Continue the group without its unfinished rollouts."""
        self._cancel(group.of(*UNGENERATED), "group_timeout")
        self._collect(group)

    def cancel_stale(self, job: JobRecord) -> None:
        """Drop a running rollout whose weights have become too old to train on."""
        self._cancel([self._ledger.rollout(job)], "stale")
        self._collect(self._ledger.groups[job.subject])

    def _cancel(self, rollouts: list[RolloutRecord], reason: str) -> None:
        for rollout in rollouts:
            job = self._ledger.jobs[rollout.id]
            self._gates.probe_lost(job.kind, job.id)
            if job.state is JobState.SUBMITTED:
                self.cancelled.append(job)
            self._ledger.end(job, JobState.CANCELLED)
            self._ledger.drop(rollout, reason)

    def _fence(self, reply: Reply) -> None:
        if reply.outcome is Outcome.DONE:
            self._ledger.increment("fenced")
        if isinstance(reply.result, RolloutResult):
            self._ledger.unwanted_blobs += self._files_of_other_executions(reply.job, reply.result)

    def _files_of_other_executions(self, rollout: str, result: RolloutResult) -> list[str]:
        """The files of `result` that did not settle `rollout`: the same reply may arrive twice.

        None for a closed group: its results are no longer in memory, and the files may be in a batch.
        """
        if ids.is_evaluation(rollout):
            return result.keys  # those of the one that settled it are deleted too
        id = ids.RolloutId.match(rollout)
        group = self._ledger.groups.get(id.group) if id else None
        if group is None:
            return []
        settled = {key for each in group.rollouts if each.result for key in each.result.keys}
        return [key for key in result.keys if key not in settled]

    def _fits(self, job: JobRecord, result: AnyResult) -> bool:
        """Whether `result` answers `job`: a worker of another version or a custom stage may send something else."""
        if result.answers != job.kind.answer:
            return False
        if job.kind is JobKind.EVALUATION_SCORE:
            return isinstance(result, ScoreResult) and self.evaluations.fits(job, result)
        if isinstance(result, DrawResult):
            return self._examples.fits(job.subject, result)
        if isinstance(result, EncodeResult):
            return result.rank is not None or bool(result.unreadable)
        if isinstance(result, ScoreResult) or (isinstance(result, AdvantageResult) and not result.dropped):
            named = result.rewards if isinstance(result, ScoreResult) else result.advantages
            return named.keys() >= {r.id for r in self._ledger.groups[job.subject].of(RolloutState.GENERATED)}
        return True

    def _settle(self, job: JobRecord, reply: Reply, result: AnyResult) -> None:
        group = self._ledger.groups.get(job.subject)
        if job.kind in (JobKind.EVALUATION, JobKind.EVALUATION_SCORE):
            self._ledger.end(job, JobState.SETTLED)
            if isinstance(result, RolloutResult):
                self.evaluations.settle(job, result)
            elif isinstance(result, ScoreResult):
                self.evaluations.scored(job, result)
            return
        if isinstance(result, RolloutResult):
            self._ledger.generated(
                self._ledger.rollout(job),
                result,
                attempt=reply.attempt,
                execution=reply.execution,
                duration_s=reply.duration_s,
            )
            self.causes.generated()
            if group is not None:
                self._examples.poison.generated(group)
        self._ledger.end(job, JobState.SETTLED, result=result if isinstance(result, StepResult) else None)
        match result:
            case SurveyResult():
                self._ledger.set(f"examples:{job.subject}", result.examples)
                self._ledger.set(f"scores_groups:{job.subject}", int(result.scores_groups))
            case DrawResult():
                self._examples.settle(job.subject, result)
            case BatchPhaseResult() | EncodeResult():
                pass
            case _:
                assert group is not None
                self._advance(group, result)

    def _advance(self, group: GroupRecord, result: AnyResult) -> None:
        match result:
            case RolloutResult():
                self._collect(group)
            case ScoreResult():
                self._scored(group, result)
            case FilterResult():
                self._filtered(group, result)
            case AdvantageResult():
                self._estimated(group, result)
            case _:
                raise AssertionError(f"{result.answers} does not answer a group's job")

    def _kill(self, job: JobRecord, why: str, error: str) -> None:
        """`why` tells how often it failed, `error` is the last one."""
        logger.error("action=dead job=%s %s", job.id, why)
        self._ledger.event(job.id, "dead", why)
        if job.kind is JobKind.SURVEY:
            self._ledger.end(job, JobState.DEAD)
            problem = sentence(f"the environment {job.subject!r} cannot be used: {why}")
            raise RunError(f"{problem} Fix it, then start the run again")
        if job.kind is JobKind.DRAW:
            self._ledger.end(job, JobState.DEAD)
            sampler = self._config.environments[job.subject].sampler
            raise RunError(
                f"environments.{job.subject}.sampler = {sampler!r} failed: {sentence(why)} Fix it, restart the compute "
                "workers, then start the run again; nothing is lost"
            )
        if job.kind in (JobKind.EVALUATION, JobKind.EVALUATION_SCORE):
            self._ledger.end(job, JobState.DEAD)
            self.evaluations.died(job, why)
            return
        group = self._ledger.groups.get(job.subject)
        if job.kind is JobKind.ROLLOUT:
            self._ledger.kill(self._ledger.rollout(job), why)
        self._ledger.end(job, JobState.DEAD)  # the composer forms the step of a dead encoding job again
        if group is None:
            return
        if job.kind is JobKind.ROLLOUT:
            self._examples.poison.died(group, error)
            self._collect(group)
            self.causes.died(error)
            return
        unfinished = group.of(RolloutState.GENERATED)
        for rollout in unfinished:
            self._ledger.kill(rollout, why)
        self._close(group, "dead")
        self.causes.died(error, len(unfinished))

    def _collect(self, group: GroupRecord) -> None:
        if group.state is not GroupState.COLLECTING:
            return
        unfinished = group.of(*UNGENERATED)
        possible = len(unfinished) + len(group.of(RolloutState.GENERATED))
        partial = possible < len(group.rollouts) and self._config.rollouts.partial_groups == "drop"
        if partial or possible < self._config.rollouts.smallest_group:
            self._cancel(unfinished, CANCELLED)
            self._close(group, TOO_SMALL)
        elif unfinished:
            return
        elif self._ledger.meta.get(f"scores_groups:{group.environment}"):
            self._ledger.enter(group, GroupState.SCORING)
            self._ledger.add_job(ids.score_job(group.id), JobKind.SCORE, group.id)
        else:
            self._filter(group)

    def _scored(self, group: GroupRecord, result: ScoreResult) -> None:
        for rollout in group.of(RolloutState.GENERATED):
            named = {name: parts[rollout.id] for name, parts in result.named.items() if rollout.id in parts}
            self._ledger.score(rollout, result.rewards[rollout.id], named)
        self._filter(group)

    def _filter(self, group: GroupRecord) -> None:
        """Rewards are counted before a filter drops the groups that are solved by all or by none."""
        rewards = [rollout.result.reward for rollout in group.rollouts if rollout.result]
        self._ledger.increment(f"played:{group.environment}", len(rewards))
        total = f"played_reward:{group.environment}"
        self._ledger.set(total, self._ledger.seconds(total) + sum(rewards))
        self._ledger.enter(group, GroupState.FILTERING)
        self._ledger.add_job(ids.filter_job(group.id), JobKind.FILTER, group.id)

    def _filtered(self, group: GroupRecord, result: FilterResult) -> None:
        for name, rollouts in result.matched.items():
            self._ledger.increment(f"matched:{name}", rollouts)
        for rollout in group.of(RolloutState.GENERATED):
            if rollout.id in result.dropped:
                self._ledger.drop(rollout, result.dropped[rollout.id])
            elif rollout.id in result.masked:
                self._ledger.mask(rollout)
        if not group.of(RolloutState.GENERATED):
            self._close(group, "filtered")
            return
        self._ledger.enter(group, GroupState.ESTIMATING)
        self._ledger.add_job(ids.advantages_job(group.id), JobKind.ADVANTAGE, group.id)

    def _estimated(self, group: GroupRecord, result: AdvantageResult) -> None:
        if result.dropped:
            self._close(group, result.dropped)
            return
        for rollout in group.of(RolloutState.GENERATED):
            rollout.masked |= result.masked
            self._admit(group, rollout, result)
        self._ledger.enter(group, GroupState.ADMITTED)
        self._examples.played(group)
        self._ledger.set("dropped_in_a_row", 0)
        self._count_admitted(group.of(RolloutState.ADMITTED), group_masked=result.masked)
        for counter in ("groups_admitted", f"groups_admitted:{group.environment}"):
            self._ledger.increment(counter)

    def _count_admitted(self, rollouts: list[RolloutRecord], *, group_masked: bool) -> None:
        masked = sum(rollout.masked for rollout in rollouts)
        matched = lambda name: self._ledger.number(f"matched:{name}")  # noqa: E731
        masked_by = masking(self._config.filters, matched, group=group_masked) if masked else ""
        equal = len({rollout.result.reward for rollout in rollouts if rollout.result}) == 1
        credited = any(rollout.advantage or (rollout.result and rollout.result.credit) for rollout in rollouts)
        self.causes.admitted(len(rollouts), masked=masked, masked_by=masked_by, flat=equal and not credited)

    def _admit(self, group: GroupRecord, rollout: RolloutRecord, result: AdvantageResult) -> None:
        assert rollout.result is not None
        rollout.advantage = result.advantages[rollout.id]
        if result.credit and rollout.result.columns:
            credit = credit_key(rollout.result.columns.key, result.credit)
            rollout.result = rollout.result.model_copy(update={"credit": credit})
        self._ledger.move(rollout, RolloutState.ADMITTED)
        for counter in ("tokens_admitted", f"tokens_admitted:{group.environment}"):
            self._ledger.increment(counter, rollout.result.completion_tokens)

    def _close(self, group: GroupRecord, reason: str) -> None:
        """Drop the rest of the group; the planner replaces it."""
        for rollout in group.of(RolloutState.GENERATED):
            self._ledger.drop(rollout, reason)
        dropped = group.of(RolloutState.FILTERED)
        for why, number in Counter(rollout.reason for rollout in dropped).items():
            rewards = [rollout.result.reward for rollout in dropped if rollout.result and rollout.reason == why]
            self.causes.dropped(why or reason, number, rewards)
        self._examples.played(group, reason)
        self._ledger.event(group.id, "dropped", reason)
        self._ledger.increment("dropped_in_a_row")
        self._ledger.enter(group, GroupState.CLOSED)
