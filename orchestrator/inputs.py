"""Job inputs: the files that jobs read from the store. Written before submission, deleted when not needed."""

from headpond import job_inputs
from headpond.batches import BatchPlan
from headpond.config import RunConfig
from headpond.job_inputs import Content
from headpond.ledger.states import STEP_JOBS, GroupState, JobKind, RolloutState
from headpond.messages import BatchPhaseResult, GroupInputs, GroupMember, StepValues
from headpond.orchestrator.examples.choice import Examples
from headpond.orchestrator.examples.evaluation import Evaluations
from headpond.orchestrator.housekeeping import Reported, delete
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.records import (
    ESTIMATOR_STATE,
    BatchRecord,
    GroupRecord,
    JobRecord,
    Value,
)
from headpond.orchestrator.slices import in_slices
from headpond.runtime.offload import in_io_thread
from headpond.store import Store, open_store

READ_IN_STATES = frozenset({GroupState.SCORING, GroupState.FILTERING, GroupState.ESTIMATING})
BY_JOB = frozenset({JobKind.DRAW, JobKind.EVALUATION_SCORE})
"""Their files are named by the job."""
READING_KINDS = STEP_JOBS | BY_JOB | {JobKind.SCORE, JobKind.FILTER, JobKind.ADVANTAGE}
LOOK_ABOVE = 64  # files that may be left although no job reads them: looking for them costs as much as is open
LOOKED_AT_AT_ONCE = 1_000  # groups: about 1 ms
FORGOTTEN_AT_ONCE = 100  # files: freeing the contents takes about 0.5 ms. 2,500 at once took 10 ms


class JobInputs:
    def __init__(self, config: RunConfig, run: str, ledger: Ledger) -> None:
        self._config = config
        self._run = run
        self._ledger = ledger
        self._examples = Examples(config, ledger)
        self._evaluations = Evaluations(config, ledger)
        self._store = open_store(config.store_url)
        self._written: dict[str, Content | None] = dict.fromkeys(job_inputs.keys(self._store, run))
        """files in the store; None for those of an earlier orchestrator"""
        self._look_at = 0
        self.writing = Reported(f"write to the store {self._store}", "free space or repair it; nothing is lost")

    def key(self, job: JobRecord) -> str:
        if job.kind in STEP_JOBS:
            batch = self._ledger.batches[int(job.subject)]
            key_of = job_inputs.step_key if job.kind is JobKind.ENCODE else job_inputs.values_key
            return key_of(self._run, batch.step, batch.formation)
        if job.kind in BY_JOB:
            return job_inputs.job_key(self._run, job.id)
        return job_inputs.group_key(self._run, job.subject)

    def result_key(self, job: JobRecord) -> str | None:
        """The file that a settled batch phase wrote."""
        if not isinstance(job.result, BatchPhaseResult):
            return None
        batch = self._ledger.batches[int(job.subject)]
        return job_inputs.advantages_key(self._run, batch.step, batch.formation, job.result.execution)

    def credit_key(self, job: JobRecord) -> str | None:
        """The file for the advantages of turns that a settled batch phase may have written."""
        if not isinstance(job.result, BatchPhaseResult):
            return None
        batch = self._ledger.batches[int(job.subject)]
        return job_inputs.step_credit_key(self._run, batch.step, batch.formation, job.result.execution)

    def adopt(self, key: str | None) -> None:
        """Delete the file, which a job wrote, when no open step needs it."""
        if key:
            self._written[key] = None

    async def ensure(self, jobs: list[JobRecord]) -> bool:
        """Write the files that `jobs` read. False when the store cannot be written: the jobs wait.

        An unchanged file is not written again, except for a job that is retried: it may have failed for lack of it.
        """
        readers = [(self.key(job), job) for job in jobs if job.kind in READING_KINDS]
        retried = {key for key, job in readers if job.attempt}
        contents = {key: await self._content(job) for key, job in dict(readers).items()}
        wanted = {key: new for key, new in contents.items() if key in retried or self._written.get(key) != new}
        if not wanted:
            return True
        stale = await self._stale() - contents.keys()
        with self.writing:
            await in_io_thread(_write_and_delete, self._store, wanted, stale)
        if self.writing.trouble:
            return False
        async for some in in_slices(list(stale), FORGOTTEN_AT_ONCE):
            for key in some:
                self._written.pop(key)
        self._written |= wanted
        return True

    async def _stale(self) -> set[str]:
        """The files that are not needed: looked for when there are twice as many as the last look has left."""
        if len(self._written) < self._look_at:
            return set()
        # Only the caller's task writes files, so that no other file is needed after a slice than before it.
        by_job = [*self._examples.open_draws(), *self._evaluations.score_jobs()]
        needed = self._needed_by_steps() | {job_inputs.job_key(self._run, job) for job in by_job}
        async for groups in in_slices(self._ledger.groups_in(*READ_IN_STATES), LOOKED_AT_AT_ONCE):
            needed |= {job_inputs.group_key(self._run, group.id) for group in groups}
        stale = self._written.keys() - needed
        self._look_at = max(LOOK_ABOVE, 2 * (len(self._written) - len(stale)))
        return stale

    def _needed_by_steps(self) -> set[str]:
        batches = self._ledger.batches.values()
        steps = {job_inputs.step_key(self._run, batch.step, batch.formation) for batch in batches}
        phases = [job for batch in batches if (job := self._ledger.jobs.get(batch.batch_phase_id))]
        results = {key for job in phases for key in (self.result_key(job), self.credit_key(job)) if key}
        return steps | results | {batch.credit for batch in batches if batch.credit} | set(map(self.key, phases))

    async def _content(self, job: JobRecord) -> Content:
        """Of a step in a thread: 12 ms for 2,048 rollouts. Only the caller's task changes an open step."""
        if job.kind is JobKind.ENCODE:
            return await in_io_thread(batch_plan, self._config, self._ledger.batches[int(job.subject)])
        if job.kind is JobKind.BATCH_PHASE:
            batch, state = self._ledger.batches[int(job.subject)], self._ledger.meta.get(ESTIMATOR_STATE)
            return await in_io_thread(step_values, batch, state)
        if job.kind is JobKind.DRAW:
            return self._examples.draw_inputs(job)
        if job.kind is JobKind.EVALUATION_SCORE:
            return self._evaluations.score_inputs(job)
        return group_inputs(self._ledger.groups[job.subject], self._ledger.number("policy_version"))


def _write_and_delete(store: Store, wanted: dict[str, Content], stale: set[str]) -> None:
    for key, content in wanted.items():
        job_inputs.write(store, key, content)
    delete(store, stale)


def group_inputs(group: GroupRecord, policy_version: int) -> GroupInputs:
    """All generated rollouts: the reward of a dropped one still counts in the baseline."""
    finished = [(rollout.id, rollout.result) for rollout in group.rollouts if rollout.state is not RolloutState.DEAD]
    return GroupInputs(
        group=group.id,
        environment=group.environment,
        example=group.example,
        policy_version=policy_version,
        members=[GroupMember(rollout=id, result=result) for id, result in finished if result],
    )


def step_values(batch: BatchRecord, state: Value) -> StepValues:
    """What the batch phase of `batch` reads."""
    groups = {group.id: (group.id, group.environment, group.example) for group in batch.groups}
    rollouts = sorted(batch.rollouts(), key=lambda rollout: rollout.id)
    results = [rollout.result for rollout in rollouts if rollout.result]
    return job_inputs.step_values(
        [rollout.id for rollout in rollouts],
        [groups[rollout.group] for rollout in rollouts],
        results,
        values=[rollout.advantage or 0.0 for rollout in rollouts],
        credit=[result.credit for result in results],
        state=str(state) if state is not None else None,
    )


def batch_plan(config: RunConfig, batch: BatchRecord) -> BatchPlan:
    """What the encoding jobs of `batch` read, and what its manifest names."""
    environments = {group.id: group.environment for group in batch.groups}
    rollouts = [
        job_inputs.batch_rollout(
            rollout.id, rollout.group, environments[rollout.group], rollout.result,
            advantage=batch.advantages[rollout.id], masked=rollout.masked, credit=rollout.result.credit,
        )
        for rollout in batch.rollouts() if rollout.result
    ]  # fmt: skip
    return job_inputs.batch_plan(config, batch.step, rollouts, batch.credit)
