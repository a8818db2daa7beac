"""A stage as the run sees it: what it writes before a job, and what it does with a result, a failure, a death.

Each is one module of `orchestrator/stages/`; message and body are the module of the same name in `tasks/stages/`. A new
stage of a group overrides `apply`, and `settled`, `fields` or `fits` only where it differs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from headpond import ids
from headpond.config import RunConfig
from headpond.ledger.states import RolloutState
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.endings.causes import Causes
from headpond.orchestrator.exchange.gates import Gate, Gates
from headpond.orchestrator.exchange.inputs import group_inputs
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import BatchRecord, GroupRecord, JobRecord
from headpond.orchestrator.serving.serving_weights import ServingWeights
from headpond.records.wire import Result
from headpond.tasks import inputs
from headpond.tasks.inputs import Content
from headpond.tasks.stage import Message, Reply, Stage

R = TypeVar("R", bound=Result)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the stages of a run share."""

    config: RunConfig
    run: str
    ledger: Ledger
    gates: Gates
    causes: Causes
    weights: ServingWeights
    advance: Callable[[GroupRecord], None]  # begins the next stage of the group
    drop: Callable[[GroupRecord, str], None]
    advance_step: Callable[[BatchRecord], None]


class RunStage(Generic[R]):
    """One instance a run. A method's changes and the next job are one transaction."""

    stage: ClassVar[Stage[Any, Any]]

    def __init__(self, parts: Parts) -> None:
        self.name: str = self.stage.name  # in the ledger
        self._config = parts.config
        self._run = parts.run
        self._ledger = parts.ledger
        self._causes = parts.causes
        self._parts = parts
        self.gate = parts.gates.all[self.stage.gate] if self.stage.gate else Gate(Troubles())

    @property
    def timeout_s(self) -> float:
        config = self._config
        return config.rollouts.timeout_s if self.stage.ends_itself else config.recovery.stage_timeout_s

    # before a job is submitted

    def message(self, job: JobRecord) -> Message:
        key = self.key(job)
        return self.stage.message(
            run=self._run,
            job=job.id,
            attempt=job.attempt,
            sequence=job.sequence,
            timeout_s=self.timeout_s,
            **self.fields(job),
            **({"plan": key} if key else {}),
        )

    def fields(self, job: JobRecord) -> dict[str, Any]:
        """The fields of its message that no other stage has."""
        return {}

    def key(self, job: JobRecord) -> str | None:
        """The file that the job reads; None without one."""
        return None

    async def inputs(self, job: JobRecord) -> Content:
        """The content of that file. What takes milliseconds is built in a thread."""
        raise NotImplementedError

    def reads_besides(self, job: JobRecord) -> Iterable[str]:
        """Files that the run does not write and a job needs: they are deleted when no job needs them."""
        return ()

    # after its reply

    def fits(self, job: JobRecord, result: R) -> bool:
        """Whether `result` answers `job`: a custom stage may return something else."""
        return True

    def settled(self, job: JobRecord, result: R, reply: Reply) -> None:
        """The job is done."""

    def died(self, job: JobRecord, why: str, error: str) -> None:
        """The attempts of the job are used up. `why` has their number, `error` is the last one."""

    def fenced(self, reply: Reply) -> None:
        """The result of another execution has settled the job, or nothing waits for it."""

    def seen_running(self, job: JobRecord, version: int) -> bool:
        """A worker executes the job, since the policy had `version`. Return whether the job was cancelled."""
        return False


class GroupStage(RunStage[R]):
    """Its subject is a group, and its job reads the group's finished rollouts."""

    def wants(self, group: GroupRecord) -> bool:
        """Whether the group passes this stage."""
        return True

    def enter(self, group: GroupRecord) -> None:
        self._ledger.enter(group, self.name)
        self._ledger.add_job(ids.group_job(group.id, self.name), self.name, group.id)

    def apply(self, group: GroupRecord, result: R) -> str | None:
        """Write the result. Return the reason to drop the whole group, or None to go on."""
        return None

    def key(self, job: JobRecord) -> str | None:
        return inputs.key(self._run, job.subject)

    async def inputs(self, job: JobRecord) -> Content:
        return group_inputs(self._ledger.groups[job.subject], self._ledger.state.policy_version)

    def names_all(self, job: JobRecord, rollouts: Iterable[str]) -> bool:
        """Whether `rollouts` are at least those of the group that are still in it."""
        return set(rollouts) >= {r.id for r in self._ledger.groups[job.subject].of(RolloutState.GENERATED)}

    def settled(self, job: JobRecord, result: R, reply: Reply) -> None:
        group = self._ledger.groups[job.subject]
        reason = self.apply(group, result)
        if reason is None:
            self._parts.advance(group)
        else:
            self._parts.drop(group, reason)

    def died(self, job: JobRecord, why: str, error: str) -> None:
        if group := self._ledger.groups.get(job.subject):
            unfinished = group.of(RolloutState.GENERATED)
            for rollout in unfinished:
                self._ledger.kill(rollout, why)
            self._parts.drop(group, "dead")
            if not group.is_evaluation:
                self._causes.died(error, len(unfinished))


class StepStage(RunStage[R]):
    """Its subject is a composed step. Its results stay with its jobs until the step is delivered."""

    def batch(self, job: JobRecord) -> BatchRecord:
        return self._ledger.batches[int(job.subject)]

    def enter(self, batch: BatchRecord) -> None:
        """Add its jobs."""
        raise NotImplementedError
