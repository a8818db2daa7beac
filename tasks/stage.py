"""A stage: the message that asks for its job, the body that does it, and the result that the reply carries.

Each stage is one module of `tasks/stages/`, which defines `STAGE`. The module of the same name in
`orchestrator/stages/` is what a run does with it. A message is at most 4 KB of JSON, a reply 4.8 KB, except the scores
of a group with named rewards and the draws of a sampler. No message contains a path, a class or code: keys are relative
to the store of each process's own configuration.
"""

import functools
import importlib
import pkgutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field, FiniteFloat, SerializeAsAny, ValidationInfo, field_validator

from headpond.broker.queues import Queue
from headpond.config import RunConfig
from headpond.errors import ERROR_CHARACTERS
from headpond.ids import LeaseId, TaskId
from headpond.records.rollout import ReplicaUses
from headpond.records.wire import Result, WireModel
from headpond.store import Store, open_store

if TYPE_CHECKING:  # only rollout workers load environments and the engine's client
    from headpond.tasks.player import Player

REPLY_LIMIT_BYTES = 1 << 20  # of a group's scores, which grow with `rollouts.group_size`
GRACE_S = 20.0  # for a body to store its results after its own time-out


class Message(WireModel):
    """One submission of one job."""

    run: str  # id of the run
    job: str
    # counts the submissions of this job, from 1; part of the Celery task id, which is never
    # used twice
    attempt: int
    sequence: int  # position in the run's order of submissions
    # after which the body ends itself; the orchestrator and Celery enforce it with GRACE_S
    # added
    timeout_s: float

    @property
    def task_id(self) -> str:
        return str(TaskId(self.run, self.job, self.attempt))


class PlanMessage(Message):
    """The message of a job that reads a file."""

    plan: str  # key of the file in the store


M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Result)


@dataclass(frozen=True, kw_only=True)
class Call(Generic[M]):
    """What a body gets."""

    message: M
    execution: str  # id of this execution: part of the names of the files that it writes
    config: RunConfig
    opened: "Player | None" = None

    @property
    def player(self) -> "Player":
        """What the jobs of a rollout worker share; the stages of other queues have none."""
        assert self.opened is not None, "only rollout workers have a player"
        return self.opened

    @functools.cached_property
    def store(self) -> Store:
        return open_store(self.config.store_url)


class Subject(StrEnum):
    """What a stage works on, one job at a time. It decides how long the ledger keeps a job that has ended."""

    ENVIRONMENT = "environment"  # its row is deleted: other records have the result
    GROUP = "group"  # its row stays until the group is archived
    STEP = "step"  # it stays in memory with its result until the step is delivered


Body = Callable[[Call[M]], R | Awaitable[R]]


@dataclass(frozen=True, kw_only=True)
class Stage(Generic[M, R]):
    name: str  # in the ledger, in replies, in metrics
    queue: Queue
    task: str  # Celery's name, explicit, so that no import path reaches the wire
    subject: Subject
    message: type[M]
    result: type[R]
    body: Body[M, R]  # async on the queue `rollouts`, which runs on the asyncio pool
    # the gate that holds its jobs back while the engine or the store is away
    gate: Literal["rollouts", "filtering", "encoding"] | None = None
    ends_itself: bool = False  # its body ends in time by itself: only the store may take longer


@functools.cache
def all_stages() -> dict[str, Stage[Any, Any]]:
    """Every stage by its name. A test or a benchmark replaces an entry to give a stage another body."""
    folder = importlib.import_module("headpond.tasks.stages")
    names = (f"{folder.__name__}.{module.name}" for module in pkgutil.iter_modules(folder.__path__))
    stages: list[Stage[Any, Any]] = [importlib.import_module(name).STAGE for name in names]
    return {stage.name: stage for stage in stages}


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"  # counts towards `max_failures`
    UNREACHABLE = "unreachable"  # no engine answered: not counted, submission pauses
    UNWRITTEN = "unwritten"  # the store could not be written: not counted, submission pauses
    RELEASED = "released"  # the worker is stopping: submitted again at once, not counted
    # the worker has other settings, or failed this job before: submitted again after a pause,
    # not counted
    DECLINED = "declined"


class Reply(WireModel):
    stage: str
    run: str
    job: str
    attempt: int
    execution: str  # random id of this execution: a message may be executed twice
    worker: str  # host and process that executed it
    node: str  # Celery's name of that worker
    settings: str  # digest of the settings that the worker used
    outcome: Outcome
    result: SerializeAsAny[Result] | None = None
    error: Annotated[str, Field(max_length=ERROR_CHARACTERS)] | None = None
    duration_s: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    replica_uses: ReplicaUses = {}  # of a rollout, whatever its outcome

    @field_validator("result", mode="before")
    @classmethod
    def _read_as_the_stages_result(cls, value: Any, info: ValidationInfo) -> Any:
        stage = all_stages().get(info.data.get("stage", ""))
        if not isinstance(value, dict):
            return value
        if stage is None:
            raise ValueError("there is no such stage")
        return stage.result.model_validate(value)

    @property
    def names_own_files(self) -> bool:
        """Whether every file in its result was written by the execution that it answers for."""
        execution = LeaseId(self.run, self.job, self.attempt, self.execution)
        return self.result is None or self.result.names_only_files_of(execution)
