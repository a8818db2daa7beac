"""The ledger of a run: open records in memory, all records in SQLite.

Every method is synchronous and leaves the records consistent. Changes between two awaits of the caller are one
transaction; `committed()` returns when all changes so far are on disk. Nothing that depends on a change may leave the
process before that.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Literal

from headpond.errors import shortened
from headpond.ids import GroupId, RolloutId, execution_of, group_job
from headpond.ledger.schema import STATEMENTS
from headpond.ledger.states import (
    EVALUATION_ENDS,
    FINISHED,
    IN_FLIGHT,
    UNGENERATED,
    UNREAD,
    BatchState,
    GroupState,
    JobState,
    Purpose,
    RolloutState,
    check,
)
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.ledger import restore
from headpond.orchestrator.ledger.restore import Records
from headpond.orchestrator.ledger.rows import (
    BatchRecord,
    GroupRecord,
    JobRecord,
    RolloutRecord,
    Row,
    Unit,
)
from headpond.orchestrator.ledger.writer import KEEP_EVENTS_STEPS, Writer
from headpond.records.rollout import RolloutResult
from headpond.records.wire import Result
from headpond.tasks.stage import Subject

# Causes of death that are told apart; further ones count as OTHER_CAUSES, so that texts cannot
# fill the ledger.
CAUSES_MOST = 200
OTHER_CAUSES = "other errors"


class Ledger(Records):
    def __init__(
        self, path: Path, *, keep_events_steps: int = KEEP_EVENTS_STEPS, troubles: Troubles | None = None
    ) -> None:
        super().__init__(**vars(restore.read(path)))
        self._writer = Writer(path, keep_events_steps=keep_events_steps, troubles=troubles)
        counts = self.state.rollout_counts
        self.states, self.reasons = counts["states"].by_name, counts["reasons"].by_name
        # `planned`, and those that have ended: `evaluated`, `dead`, `cancelled`. No other count
        # includes them
        self.evaluation_rollouts = counts["evaluation"].by_name
        self._groups_in = defaultdict[str, dict[str, GroupRecord]](dict)
        # open groups of evaluations: few among those of training
        self.evaluation_groups = {id: group for id, group in self.groups.items() if group.is_evaluation}
        self.unfinished = Counter[str]()  # environment -> groups that a stage works on
        # (environment, unit) -> what the admitted groups hold, in groups, rollouts and
        # completion tokens
        self.admitted = Counter[tuple[str, Unit]]()
        for group in self.groups.values():
            self._groups_in[group.state][group.id] = group
            self._count([group], 1)
        # (queue, state) -> jobs in `jobs`
        self.job_counts = Counter((job.queue, job.state) for job in self.jobs.values())
        # jobs to be submitted
        self.waiting: dict[str, JobRecord] = {id: job for id, job in self.jobs.items() if job.state is JobState.WAITING}
        self.unwanted_blobs: list[str] = []  # keys of blobs to delete after the next commit
        self._changed: dict[int, tuple[str, RolloutRecord | GroupRecord | JobRecord | BatchRecord]] = {}
        # statement of the schema -> its rows, of what is no record in `_changed`
        self._rows = defaultdict[str, list[Row]](list)
        self._last_commit: asyncio.Future[None] | None = None

    @property
    def ungenerated(self) -> int:
        return sum(self.states[state] for state in UNGENERATED)

    def kind(self, job: JobRecord) -> str:
        """The name under which its duration and its death are counted: jobs of evaluations have names of their own."""
        group = self.groups.get(job.subject)
        return f"evaluation_{job.stage}".removesuffix("_play") if group and group.is_evaluation else job.stage

    def event(self, subject: str, action: str, detail: str = "") -> None:
        self._rows["events"].append((time.time(), self.state.steps_delivered, subject, action, detail))

    # groups and rollouts

    def plan(self, *, environment: str, example: int, size: int, purpose: Purpose = Purpose.TRAINING) -> GroupRecord:
        self.state.groups_planned += 1
        ordinal = self.state.groups_planned
        group = GroupRecord(
            id=str(GroupId(ordinal)), ordinal=ordinal, environment=environment, example=example, purpose=purpose
        )
        group.rollouts = [RolloutRecord(group=group.id, index=index) for index in range(size)]
        if group.is_evaluation:
            self.evaluation_groups[group.id] = group
            self.evaluation_rollouts["planned"] += size
        else:
            self.state.rollouts_planned += size
            self.states[RolloutState.PLANNED] += size
        self.groups[group.id] = self._groups_in[group.state][group.id] = group
        self._count([group], 1)
        self._touch("groups", group)
        for rollout in group.rollouts:
            self._touch("rollouts", rollout)
            self.add_job(rollout.id, GroupState.PLAYING, group.id)
        return group

    def rollout(self, job: JobRecord) -> RolloutRecord:
        return self.groups[job.subject].rollouts[RolloutId.parse(job.id).number]

    def move(
        self, rollout: RolloutRecord, state: RolloutState, *, reason: str | None = None, error: str | None = None
    ) -> None:
        group = self.groups[rollout.group]
        if group.is_evaluation:
            state, reason = EVALUATION_ENDS.get(state, (state, reason))
        check(rollout.id, rollout.state, state)
        if rollout.state is RolloutState.ADMITTED and state is RolloutState.FILTERED:
            self._count_rollouts(group.environment, [rollout], -1)
        if state is RolloutState.EVALUATED:
            self.evaluation_rollouts[reason or state] += 1
        elif not group.is_evaluation:
            self.states[rollout.state] -= 1
            self.states[state] += 1
            self.reasons.update([reason] if reason else ())
        rollout.state, rollout.reason = state, reason
        rollout.error = shortened(error) if error else rollout.error
        if state in UNREAD and rollout.result:
            self.unwanted_blobs += rollout.result.keys
            self.state.open_bytes -= 0 if group.is_evaluation else rollout.result.stored_bytes
        self._touch("rollouts", rollout)

    def generated(
        self,
        rollout: RolloutRecord,
        result: RolloutResult,
        *,
        attempt: int | None = None,
        execution: str | None = None,
        duration_s: float | None = None,
    ) -> None:
        """Without an execution, its files say which one it was."""
        if execution is None and result.keys and (named := execution_of(result.keys[0])):
            attempt, execution = named
        rollout.attempt, rollout.execution, rollout.duration_s = attempt, execution, duration_s
        rollout.generated_at = time.time()
        rollout.result = result
        self.move(rollout, RolloutState.GENERATED)
        if self.groups[rollout.group].is_evaluation:
            return
        self.state.rollouts_generated += 1
        self.state.tokens_generated += result.completion_tokens
        self.state.open_bytes += result.stored_bytes
        if result.experts:
            self.state.experts_bytes += result.experts.size

    def score(self, rollout: RolloutRecord, reward: float, rewards: Mapping[str, float] | None = None) -> None:
        """`rewards` are named parts of the reward; without any, those of the rollout stay."""
        assert rollout.result is not None
        update = {"reward": reward} | ({"rewards": dict(rewards)} if rewards else {})
        rollout.result = rollout.result.model_copy(update=update)
        self._touch("rollouts", rollout)

    def mask(self, rollout: RolloutRecord) -> None:
        """Deliver it with loss mask 0."""
        rollout.masked = True
        self._touch("rollouts", rollout)

    def estimate(self, rollout: RolloutRecord, advantage: float, *, masked: bool, credit: str | None) -> None:
        rollout.advantage = advantage
        rollout.masked |= masked
        if credit and rollout.result:
            rollout.result = rollout.result.model_copy(update={"credit": credit})
        self._touch("rollouts", rollout)

    def drop(self, rollout: RolloutRecord, reason: str) -> None:
        self.move(rollout, RolloutState.FILTERED, reason=reason)

    def kill(self, rollout: RolloutRecord, error: str) -> None:
        self.move(rollout, RolloutState.DEAD, error=error)

    def groups_in(self, *states: str) -> list[GroupRecord]:
        """Open groups in these states, in no order: costs what it returns, not what is open."""
        return [group for state in states for group in self._groups_in[state].values()]

    def enter(self, group: GroupRecord, state: str) -> None:
        self.enter_all([group], state)
        if state == GroupState.CLOSED and not group.is_evaluation and not group.of(RolloutState.DELIVERED):
            self.state.groups_dropped += 1

    def cancel(self, group: GroupRecord, reason: str) -> None:
        """End its jobs, drop its rollouts and close it."""
        for id in (*(rollout.id for rollout in group.rollouts), group_job(group.id, group.state)):
            if job := self.jobs.get(id):
                self.end(job, JobState.CANCELLED)
        for rollout in group.of(*IN_FLIGHT):
            self.drop(rollout, reason)
        self.enter(group, GroupState.CLOSED)

    def enter_all(self, groups: list[GroupRecord], state: str) -> None:
        """For groups of one state. Those that become or were admitted have admitted rollouts at this time."""
        self._count(groups, -1)
        entered = self._groups_in[state]
        for group in groups:
            self._groups_in[group.state].pop(group.id)
            group.state = state
            if state == GroupState.CLOSED:
                self.groups.pop(group.id)
                self.evaluation_groups.pop(group.id, None)
            else:
                entered[group.id] = group
            self._touch("groups", group)
        if state != GroupState.CLOSED:
            self._count(groups, 1)

    def _count(self, groups: list[GroupRecord], sign: Literal[1, -1]) -> None:
        """Add or subtract groups of one state."""
        by_environment = defaultdict[str, list[GroupRecord]](list)
        for group in groups:
            by_environment[group.environment].append(group)
        for environment, some in by_environment.items():
            state = some[0].state
            if state not in FINISHED:
                self.unfinished[environment] += sign * len(some)
            elif state == GroupState.ADMITTED:
                self.admitted[environment, "groups"] += sign * len(some)
                self._count_rollouts(environment, [r for each in some for r in each.of(RolloutState.ADMITTED)], sign)

    def _count_rollouts(self, environment: str, admitted: list[RolloutRecord], sign: Literal[1, -1]) -> None:
        tokens = sum([rollout.result.completion_tokens for rollout in admitted if rollout.result])
        self.admitted[environment, "rollouts"] += sign * len(admitted)
        self.admitted[environment, "tokens"] += sign * tokens

    # jobs

    def add_job(self, id: str, stage: str, subject: str) -> JobRecord:
        job = self.jobs[id] = self.waiting[id] = JobRecord(id=id, stage=stage, subject=subject)
        self.job_counts[job.queue, job.state] += 1
        self._touch("jobs", job)
        return job

    def _set_state(self, job: JobRecord, state: JobState) -> None:
        self.job_counts[job.queue, job.state] -= 1
        self.job_counts[job.queue, state] += 1
        job.state = state

    def _remove(self, job: JobRecord) -> None:
        if self.jobs.pop(job.id, None):
            self.job_counts[job.queue, job.state] -= 1

    def submit(self, job: JobRecord) -> None:
        """Begin the next attempt. Commit before its message is published."""
        job.attempt += 1
        self.state.sequence += 1
        job.sequence = self.state.sequence
        self._set_state(job, JobState.SUBMITTED)
        self.waiting.pop(job.id)
        self._touch("jobs", job)
        if job.stage == GroupState.PLAYING and (rollout := self.rollout(job)).state is not RolloutState.SUBMITTED:
            self.move(rollout, RolloutState.SUBMITTED)

    def retry(self, job: JobRecord, *, error: str | None = None, failures: int = 0, losses: int = 0) -> None:
        """The attempt gave no result: `job` waits to be submitted again."""
        self._set_state(job, JobState.WAITING)
        job.result = None
        self.waiting[job.id] = job
        job.failures += failures
        job.losses += losses
        job.error = error or job.error
        self._touch("jobs", job)

    def end(self, job: JobRecord, state: JobState, *, result: Result | None = None) -> None:
        """`result` is kept for a job of a step."""
        self._set_state(job, state)
        job.result = result if job.subject_kind is Subject.STEP else None
        self.waiting.pop(job.id, None)
        self._touch("jobs", job)
        if state is JobState.DEAD:
            self._count_death(self.kind(job), job.error or "")
        if job.subject_kind is Subject.ENVIRONMENT:
            self._forget_job(job)
        elif job.subject_kind is Subject.GROUP:
            self._remove(job)

    def _count_death(self, kind: str, error: str) -> None:
        dead = self.state.dead_jobs
        causes, row = sum(len(each.by_name) for each in dead.values()), dead[kind]
        row.by_name[error if error in row.by_name or causes < CAUSES_MOST else OTHER_CAUSES] += 1
        row.touch()

    def _forget_job(self, job: JobRecord) -> None:
        """Delete its row: those of groups stay until their group is archived."""
        self._remove(job)
        self._changed.pop(id(job), None)
        self._rows["forgotten_jobs"].append((job.id,))

    # batches

    def compose(self, step: int, groups: list[GroupRecord], *, final: bool = True) -> BatchRecord:
        """`final`: the groups' values are the advantages; else a batch phase computes these from them."""
        self.state.formation += 1
        batch = self.batches[step] = BatchRecord(step=step, formation=self.state.formation, groups=groups)
        self._touch("batches", batch)
        admitted = [rollout for group in groups for rollout in group.of(RolloutState.ADMITTED)]
        if final:
            self.set_advantages(batch, {rollout.id: rollout.advantage or 0.0 for rollout in admitted})
        self.enter_all(groups, GroupState.BATCHED)
        self._rows["batched"] += [(step, group.id) for group in groups]
        self._move_all(admitted, RolloutState.BATCHED, step, old=RolloutState.ADMITTED)
        return batch

    def _move_all(
        self, rollouts: list[RolloutRecord], state: RolloutState, step: int | None, *, old: RolloutState
    ) -> None:
        """Move rollouts that are all `old`. Their rows are changed by one statement per group, added by the caller."""
        check(f"of step {step}", old, state)
        for rollout in rollouts:
            rollout.state, rollout.step = state, step
        self.states[old] -= len(rollouts)
        self.states[state] += len(rollouts)

    def set_advantages(
        self, batch: BatchRecord, final: Mapping[str, float], *, state: str | None = None, credit: str | None = None
    ) -> None:
        """The final advantages, by rollout, the estimator's state after the step, and the file with those of turns."""
        batch.advantages, batch.estimator_state, batch.credit = dict(final), state, credit
        if phase := self.jobs.get(batch.batch_phase_id):
            self._forget_job(phase)
        self._touch("batches", batch)

    def dissolve(self, batch: BatchRecord) -> None:
        """Return its rollouts to admitted: the step will be formed again."""
        self._move_all(list(batch.rollouts()), RolloutState.ADMITTED, None, old=RolloutState.BATCHED)
        self._rows["batched"] = [row for row in self._rows["batched"] if row[0] != batch.step]
        self._rows["dissolved"] += [(group.id,) for group in batch.groups]
        self.enter_all(batch.groups, GroupState.ADMITTED)
        self._forget(batch)

    def deliver(self, batch: BatchRecord) -> None:
        batch.state = BatchState.DELIVERED
        self._touch("batches", batch)
        rollouts = list(batch.rollouts())
        self.untrained[batch.step] = batch.delivered = len(rollouts)
        # A batch phase has computed others than the groups' own, which a re-formed step would have needed.
        final = batch.advantages
        others = [rollout for rollout in rollouts if final.get(rollout.id, rollout.advantage) != rollout.advantage]
        self._rows["advantages"] += [(final[rollout.id], rollout.group, rollout.index) for rollout in others]
        self.state.open_bytes -= batch.stored_bytes
        self.state.delivered_bytes += batch.stored_bytes
        self._move_all(rollouts, RolloutState.DELIVERED, batch.step, old=RolloutState.BATCHED)
        self._rows["delivered"] += [(group.id,) for group in batch.groups]
        self.enter_all(batch.groups, GroupState.CLOSED)
        for stage in self.state.stages.values():
            stage.longest_s = 0.0
        if batch.estimator_state is not None:
            self.state.last_step.estimator_state = batch.estimator_state
        self.state.steps_delivered = batch.step + 1
        self.state.formation = self.state.failed_formations = 0
        self._forget(batch)

    def train(self, acked: int) -> None:
        """Mark every step up to `acked` as trained."""
        for step in [step for step in self.untrained if step <= acked]:
            rollouts = self.untrained.pop(step)
            self.states[RolloutState.DELIVERED] -= rollouts
            self.states[RolloutState.TRAINED] += rollouts
            self._rows["trained"].append((step,))

    def _forget(self, batch: BatchRecord) -> None:
        self.batches.pop(batch.step)
        for job in list(self.jobs_of(batch)):
            if job.state is not JobState.SETTLED:
                self.end(job, JobState.CANCELLED)
            self._forget_job(job)

    def jobs_of(self, batch: BatchRecord) -> Iterator[JobRecord]:
        """Of its batch phase and of its data ranks, which are numbered from 0."""
        if phase := self.jobs.get(batch.batch_phase_id):
            yield phase
        for data_rank in count():
            job = self.jobs.get(batch.job_id(data_rank))
            if job is None:
                return
            yield job

    # committing

    def _touch(self, table: str, record: RolloutRecord | GroupRecord | JobRecord | BatchRecord) -> None:
        self._changed[id(record)] = (table, record)

    async def committed(self) -> None:
        """Return when every change so far is on disk."""
        self.commit_soon()
        if self._last_commit is not None:
            await asyncio.shield(self._last_commit)

    def commit_soon(self) -> None:
        """Hand every change so far to the writer as one transaction: between two slices of a long piece of work."""
        rows, self._rows = self._rows, defaultdict(list)
        for table, record in self._changed.values():
            rows[table].append(record.row())
        self._changed = {}
        for counts in self.state.rollout_counts.values() if rows else ():
            counts.touch()
        rows["state"], rows["forgotten_state"] = self.state.take_changes()
        if changes := {name: rows[name] for name in STATEMENTS if rows[name]}:
            self._last_commit = self._writer.commit(changes)

    def close(self) -> None:
        self._writer.close()
