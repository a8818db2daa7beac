"""What the next step waits for, for `headpond why`: its oldest open groups, their jobs, and what happens to each next.

Bounded, however many groups are open: it is computed on the loop with every status.
"""

import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from headpond.config import RunConfig
from headpond.ids import group_job
from headpond.ledger.states import FINISHED, GroupState, JobState
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import GroupRecord, JobRecord
from headpond.orchestrator.pipeline import Pipeline
from headpond.orchestrator.planning.quotas import quotas
from headpond.orchestrator.reconciler import Reconciler
from headpond.orchestrator.trainer import Trainer

GROUPS_SHOWN = 4
JOBS_SHOWN = 8  # of one group or step
LOOKED_AT = 256  # open groups, in planned order, that are searched for unfinished ones


class NextStep:
    def __init__(
        self, config: RunConfig, ledger: Ledger, trainer: Trainer, pipeline: Pipeline, reconciler: Reconciler
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._trainer = trainer
        self._pipeline = pipeline
        self._reconciler = reconciler

    def status(self) -> dict[str, Any]:
        """`waits_for`: what it needs next: `trainer`, `encoding`, or `groups`."""
        step, batch = self._ledger.state.steps_delivered, next(iter(self._ledger.batches.values()), None)
        result = {"step": step, "of": self._config.steps, "admitted": self._admitted(), "groups": [], "jobs": []}
        if batch is not None:
            jobs = self._ledger.jobs_of(batch)
            unfinished = [job for job in jobs if job.state in (JobState.WAITING, JobState.SUBMITTED)]
            return result | {"waits_for": "encoding", "jobs": [*map(self._job, unfinished[:JOBS_SHOWN])]}
        if not self._trainer.may_seal(step) and self._has_enough(step):
            return result | {"waits_for": "trainer"}
        groups = [self._group(group) for group in islice(self._unfinished(), GROUPS_SHOWN)]
        return result | {"waits_for": "groups", "groups": groups}

    def _admitted(self) -> dict[str, int]:
        unit = self._config.batch.unit
        return {name: self._ledger.admitted[name, unit] for name in self._config.environments}

    def _has_enough(self, step: int) -> bool:
        admitted = self._admitted()
        return all(admitted[name] >= quota for name, quota in quotas(self._config, step).items())

    def _unfinished(self) -> Iterator[GroupRecord]:
        """In planned order: the oldest hold up a step the longest."""
        groups = (group for group in self._ledger.groups.values() if not group.is_evaluation)
        return (group for group in islice(groups, LOOKED_AT) if group.state not in FINISHED)

    def _group(self, group: GroupRecord) -> dict[str, Any]:
        ids = [*(rollout.id for rollout in group.rollouts), group_job(group.id, group.state)]
        jobs = [job for id in ids if (job := self._ledger.jobs.get(id))]
        return {
            "group": group.id,
            "environment": group.environment,
            "example": group.example,
            "state": str(group.state),
            "rollouts": Counter(rollout.state.value for rollout in group.rollouts),
            "running_s": round(self._reconciler.group_age_s(group.id), 1),
            "next": self._next_of_group(group),
            "jobs": [*map(self._job, jobs[:JOBS_SHOWN])],
        }

    def _next_of_group(self, group: GroupRecord) -> str | None:
        rollouts = self._config.rollouts
        left_s = rollouts.group_timeout_s - self._reconciler.group_age_s(group.id)
        if rollouts.partial_groups == "wait" or group.state != GroupState.PLAYING:
            return None
        then = "is dropped" if rollouts.partial_groups == "drop" else "continues without its unfinished rollouts"
        return f"after {max(0.0, left_s):.0f} s more of running time it {then} (rollouts.group_timeout_s)"

    def _job(self, job: JobRecord) -> dict[str, Any]:
        running_s = self._reconciler.running_s(job) if job.state is JobState.SUBMITTED else None
        worker = self._reconciler.running.worker_of.get(job.id) if job.state is JobState.SUBMITTED else None
        return {
            "job": job.id,
            "kind": str(job.stage),
            "queue": job.queue.value,
            "state": "running" if worker else "queued" if job.state is JobState.SUBMITTED else "waiting",
            "attempt": job.attempt,
            "failures": job.failures,
            "losses": job.losses,
            "error": job.error,
            "worker": worker,
            "running_s": round(running_s, 1) if running_s is not None else None,
            "next": self._next_of_job(job, worker, running_s or 0.0),
        }

    def _next_of_job(self, job: JobRecord, worker: str | None, running_s: float) -> str:
        recovery = self._config.recovery
        if job.state is JobState.WAITING:
            wait_s = job.not_before - time.monotonic()
            return f"it is submitted in {wait_s:.0f} s" if wait_s > 0 else "it is submitted when its gate is open"
        if worker is None:
            return f"it runs when a worker takes it from the queue {job.queue}"
        stage = self._pipeline.stage_of(job)
        left_s = max(0.0, stage.timeout_s - running_s)
        ended = "(recovery.stage_timeout_s) and runs again"
        if stage.stage.ends_itself:  # a time-out of a rollout is a failure of the policy
            ended = "(rollouts.timeout_s) and scored with policy.policy_error_reward"
        failures, losses = recovery.max_failures - job.failures, recovery.max_losses - job.losses
        return (
            f"it is ended after {left_s:.0f} s more {ended}; it dies after {failures} more failures or {losses} more "
            "losses"
        )
