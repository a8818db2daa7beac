"""The plans that submitted jobs read from the store: written before a submission, removed when they have been read."""

import logging
from pathlib import Path

from orchestrator.ledger import Ledger
from orchestrator.records import Batch, Group, Job
from orchestrator.states import GroupState, RolloutState
from penstock import plans
from penstock.config import RunConfig
from penstock.messages import GroupMember, GroupPlan, Queue, StepMember, StepPlan
from penstock.offload import in_io_thread

logger = logging.getLogger("penstock.plans")

READ_IN = frozenset({GroupState.FILTERING, GroupState.ESTIMATING})


class PlanFiles:
    def __init__(self, config: RunConfig, run: str, ledger: Ledger) -> None:
        self._run = run
        self._ledger = ledger
        self._store = config.store_dir
        self._data_ranks = config.batch.data_ranks
        self._written: set[str] = plans.keys(self._store, run)
        self.trouble: str | None = None

    def key(self, job: Job) -> str:
        if job.queue is Queue.ENCODING:
            batch = self._ledger.batches[int(job.subject)]
            return plans.step_key(self._run, batch.step, batch.formation)
        return plans.group_key(self._run, job.subject)

    async def ensure(self, jobs: list[Job]) -> bool:
        """Write what `jobs` will read. False when the store does not take it: the jobs wait and are tried again."""
        wanted = {self.key(job): self._plan(job) for job in jobs}
        stale = self._written - self._needed() - wanted.keys()
        try:
            await in_io_thread(_write_and_delete, self._store, wanted, stale)
        except OSError as error:
            if self.trouble is None:
                logger.error("action=store_waits path=%s error=%s", self._store, error.strerror)
            self.trouble = (
                f"the store {self._store} cannot be written ({error.strerror}): "
                "make room or mend its disk; jobs wait, nothing is lost"
            )
            return False
        self._written = (self._written - stale) | wanted.keys()
        self.trouble = None
        return True

    def _needed(self) -> set[str]:
        groups = (group for group in self._ledger.groups.values() if group.state in READ_IN)
        steps = self._ledger.batches.values()
        return {plans.group_key(self._run, group.id) for group in groups} | {
            plans.step_key(self._run, batch.step, batch.formation) for batch in steps
        }

    def _plan(self, job: Job) -> GroupPlan | StepPlan:
        if job.queue is Queue.ENCODING:
            return step_plan(self._ledger.batches[int(job.subject)], self._data_ranks)
        return group_plan(self._ledger.groups[job.subject])


def _write_and_delete(store: Path, wanted: dict[str, GroupPlan | StepPlan], stale: set[str]) -> None:
    for key, plan in wanted.items():
        plans.write(store, key, plan)
    for key in stale:
        plans.delete(store, key)


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
