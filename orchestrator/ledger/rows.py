"""The ledger's records: groups with their rollouts, jobs, batches. Each returns its row; only `Ledger` changes them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import orjson

from headpond.broker.queues import Queue
from headpond.ids import EncodeJobId, RolloutId, TaskId, step_job
from headpond.ledger.archive import execution_code
from headpond.ledger.states import BatchState, GroupState, JobState, Purpose, RolloutState
from headpond.records.rollout import RolloutResult
from headpond.records.wire import Result
from headpond.tasks.stage import Stage, Subject, all_stages

Value = str | int | float | None
Row = tuple[Value, ...]
Unit = Literal["groups", "rollouts", "tokens"]  # of `batch.size`
SOLVED, UNSOLVED = 1.0, 0.0  # rewards


@dataclass(kw_only=True, eq=False)
class RolloutRecord:
    group: str
    index: int
    state: RolloutState = RolloutState.PLANNED
    reason: str | None = None  # why it was filtered
    step: int | None = None
    advantage: float | None = None
    result: RolloutResult | None = None
    masked: bool = False  # delivered with loss mask 0
    error: str | None = None
    attempt: int | None = None  # that generated it; its files are named by attempt and execution
    execution: str | None = None
    generated_at: float | None = None  # when its result was applied, in seconds since the epoch
    duration_s: float | None = None
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = str(RolloutId(self.group, self.index))  # 0.7 us: composing a step would take 6 ms more for 8,192

    def row(self) -> Row:
        result = self.result.model_dump_json() if self.result else None
        execution = execution_code(self.execution) if self.execution is not None else None
        return (self.group, self.index, self.state, self.reason, self.step, self.advantage, result, self.masked,
                self.error, self.attempt, execution, self.generated_at, self.duration_s)  # fmt: skip


@dataclass(kw_only=True, eq=False)
class GroupRecord:
    id: str
    ordinal: int  # position in the order of planning
    environment: str
    example: int
    # the name of the stage that works on it, or one of `GroupState`
    state: str = GroupState.PLAYING
    purpose: Purpose = Purpose.TRAINING
    rollouts: list[RolloutRecord] = field(default_factory=list[RolloutRecord])
    # In memory only: a restarted orchestrator checks every group again.
    # policy version against which it was checked for staleness since it was admitted
    checked_version: int | None = None
    masked: bool = False  # whether a filter of the whole group has masked it

    def row(self) -> Row:
        return (self.id, self.ordinal, self.environment, self.example, self.state, self.purpose)

    @property
    def is_evaluation(self) -> bool:
        return self.purpose is Purpose.EVALUATION

    @property
    def solved(self) -> Literal["all", "none", "mixed"]:
        """By the rewards of finished rollouts: all at 1 or more, none above 0, or mixed."""
        rewards = [rollout.result.reward for rollout in self.rollouts if rollout.result]
        if min(rewards, default=0.0) >= SOLVED:
            return "all"
        return "none" if max(rewards, default=0.0) <= UNSOLVED else "mixed"

    def of(self, *states: RolloutState) -> list[RolloutRecord]:
        return [rollout for rollout in self.rollouts if rollout.state in states]


@dataclass(kw_only=True, eq=False)
class JobRecord:
    id: str
    stage: str  # name of its stage
    subject: str  # id of the group, number of the step or name of the environment it works on
    attempt: int = 0  # number of submissions
    sequence: int = 0
    state: JobState = JobState.WAITING
    failures: int = 0
    losses: int = 0
    error: str | None = None
    result: Result | None = None  # jobs of a step only: sealing needs the result of every rank
    # In memory only: a restarted orchestrator tries every worker again.
    failed_by: list[str] = field(default_factory=list[str])  # workers that failed it
    declines: int = 0  # times that a worker gave it back
    not_before: float = 0.0  # time of the next submission, by this process's monotonic clock
    queue: Queue = field(init=False)
    subject_kind: Subject = field(init=False)

    def __post_init__(self) -> None:
        stage: Stage[Any, Any] = all_stages()[self.stage]
        self.queue = stage.queue
        self.subject_kind = stage.subject

    def task_id(self, run: str) -> str:
        """Celery's id of the newest attempt."""
        return str(TaskId(run, self.id, self.attempt))

    def row(self) -> Row:
        result = self.result.model_dump_json() if self.result else None
        return (self.id, self.stage, self.subject, self.attempt, self.sequence, self.state,
                self.failures, self.losses, self.error, result)  # fmt: skip


@dataclass(kw_only=True, eq=False)
class BatchRecord:
    step: int
    formation: int
    state: BatchState = BatchState.COMPOSED
    groups: list[GroupRecord] = field(default_factory=list[GroupRecord])
    # rollout -> its final advantage, which is encoded and sealed; empty until the batch phase
    # is done
    advantages: dict[str, float] = field(default_factory=dict[str, float])
    estimator_state: str | None = None  # state of the estimator after this step
    # key of the file with the final advantages of its rollouts' turns, where the batch phase
    # wrote one
    credit: str | None = None
    delivered: int = 0  # its rollouts, when it is delivered

    def row(self) -> Row:
        """The values of a step are kept until it is delivered: 4,096 advantages take 135 kB and 0.2 ms."""
        if self.state is not BatchState.COMPOSED:
            return (self.step, self.formation, self.state, self.delivered, None, None, None)
        advantages = orjson.dumps(self.advantages).decode()
        return (self.step, self.formation, self.state, 0, advantages, self.estimator_state, self.credit)

    def rollouts(self) -> Iterable[RolloutRecord]:
        return (rollout for group in self.groups for rollout in group.of(RolloutState.BATCHED))

    @cached_property
    def stored_bytes(self) -> int:
        """Of its rollouts' files. Call it first in a thread: 10 ms for 8,192 rollouts, which do not change while the
        step is open."""
        return sum([rollout.result.stored_bytes for rollout in self.rollouts() if rollout.result])

    @property
    def batch_phase_id(self) -> str:
        return step_job(self.step, self.formation, "batch_phase")

    def job_id(self, data_rank: int) -> str:
        return str(EncodeJobId(self.step, self.formation, data_rank))
