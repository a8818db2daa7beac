"""Play: the rollouts of a group. The group goes on when none of them is being played."""

from typing import Any

from headpond import ids
from headpond.ledger.states import UNGENERATED, GroupState, JobState, RolloutState
from headpond.orchestrator.endings.causes import CANCELLED, TOO_SMALL
from headpond.orchestrator.endings.staleness import Staleness
from headpond.orchestrator.examples.poison import Poison
from headpond.orchestrator.ledger.rows import GroupRecord, JobRecord, RolloutRecord
from headpond.orchestrator.stage import GroupStage, Parts
from headpond.records.rollout import RolloutResult
from headpond.tasks.stage import Reply
from headpond.tasks.stages import play


class Play(GroupStage[RolloutResult]):
    stage = play.STAGE

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._staleness = Staleness(parts.config, parts.ledger)
        self._poison = Poison(parts.config, parts.ledger)
        # Celery task ids of running attempts that are no longer needed: revoking them
        # saves work
        self._unneeded: list[str] = []

    def revoke(self, job: JobRecord) -> None:
        """End its running attempt soon: its result is no longer needed."""
        self._unneeded.append(job.task_id(self._run))

    def take_unneeded(self) -> list[str]:
        unneeded, self._unneeded = self._unneeded, []
        return unneeded

    def key(self, job: JobRecord) -> None:
        return None

    def fields(self, job: JobRecord) -> dict[str, Any]:
        group = self._ledger.groups[job.subject]
        return {
            "environment": group.environment,
            "example": group.example,
            "seed": self._config.seed,
            "policy_version": self._ledger.state.policy_version,
            "least_version": self._parts.weights.least_version,
            "abandoned_versions": self._parts.weights.abandoned.versions,
        }

    def settled(self, job: JobRecord, result: RolloutResult, reply: Reply) -> None:
        self._ledger.generated(
            self._ledger.rollout(job),
            result,
            attempt=reply.attempt,
            execution=reply.execution,
            duration_s=reply.duration_s,
        )
        group = self._ledger.groups[job.subject]
        if not group.is_evaluation:
            self._causes.generated()
            self._poison.generated(group)
        self._collect(group)

    def died(self, job: JobRecord, why: str, error: str) -> None:
        group = self._ledger.groups[job.subject]
        self._ledger.kill(self._ledger.rollout(job), why)
        self._collect(group)
        if not group.is_evaluation:
            self._poison.died(group, error)
            self._causes.died(error)

    def stop_waiting(self, group: GroupRecord) -> None:
        """Continue the group without its unfinished rollouts."""
        self._cancel(group.of(*UNGENERATED), "group_timeout")
        self._collect(group)

    def seen_running(self, job: JobRecord, version: int) -> bool:
        """Drop a running rollout whose weights have become too old to train on."""
        rollout = self._ledger.rollout(job)
        if rollout.state is RolloutState.SUBMITTED:
            self._ledger.move(rollout, RolloutState.RUNNING)
        group = self._ledger.groups[job.subject]
        if group.is_evaluation or not self._staleness.drops(version):
            return False
        self._cancel([rollout], "stale")
        self._collect(group)
        return True

    def _collect(self, group: GroupRecord) -> None:
        if group.state != GroupState.PLAYING:
            return
        unfinished = group.of(*UNGENERATED)
        possible = len(unfinished) + len(group.of(RolloutState.GENERATED))
        partial = possible < len(group.rollouts) and self._config.rollouts.partial_groups == "drop"
        if not group.is_evaluation and (partial or possible < self._config.rollouts.smallest_group):
            self._cancel(unfinished, CANCELLED)
            self._parts.drop(group, TOO_SMALL)
        elif not unfinished:
            self._parts.advance(group)

    def _cancel(self, rollouts: list[RolloutRecord], reason: str) -> None:
        for rollout in rollouts:
            job = self._ledger.jobs[rollout.id]
            self.gate.probe_lost(job.id)
            if job.state is JobState.SUBMITTED:
                self.revoke(job)
            self._ledger.end(job, JobState.CANCELLED)
            self._ledger.drop(rollout, reason)

    def fenced(self, reply: Reply) -> None:
        if isinstance(reply.result, RolloutResult):
            self._ledger.unwanted_blobs += self._files_of_other_executions(reply.job, reply.result)

    def _files_of_other_executions(self, rollout: str, result: RolloutResult) -> list[str]:
        """The files of `result` that did not settle `rollout`: the same reply may arrive twice.

        None for a closed group: its results are no longer in memory, and the files may be in a batch.
        """
        id = ids.RolloutId.match(rollout)
        group = self._ledger.groups.get(id.group) if id else None
        if group is None:
            return []
        settled = {key for each in group.rollouts if each.result for key in each.result.keys}
        return [key for key in result.keys if key not in settled]
