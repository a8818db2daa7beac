"""What travels between processes: jobs out, replies back. A few hundred bytes each, 4 KB at most.

Nothing here names a path, a class or a host: keys are relative to the store that each process has in its own
configuration, environments are names that the worker's own configuration resolves.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from penstock.batches.manifest import EncodedRank
from penstock.ids import TaskId
from penstock.store import BlobRef

MESSAGE_LIMIT_BYTES = 4096
GRACE_S = 20.0  # what a body that keeps its own time-out may take to put away what it has
ERROR_CHARACTERS = 600  # enough for a cause and what to do; a traceback stays in the worker's log
METRICS_LIMIT = 32
REWARDS_LIMIT = 8
SAMPLES_LIMIT = 128  # of one rollout; their lengths are what a step is packed by, before anybody has read a token
POLICY_ERROR_CHARACTERS = 120
UNREADABLE_LIMIT = 64  # rollouts named in one reply: the step is formed again without them, and others are found then
NAME_CHARACTERS = 32

Name = Annotated[str, Field(max_length=NAME_CHARACTERS)]


class Queue(StrEnum):
    ROLLOUTS = "rollouts"
    FILTERING = "filtering"
    ADVANTAGES = "advantages"
    ENCODING = "encoding"


class Message(BaseModel):
    # A message that does not fit shows in logs and in Flower: say what is wrong with it, not what is in it.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Job(Message):
    """One submission of one unit of work."""

    run: str
    """id of the run that asked"""
    job: str
    attempt: int
    """counts the submissions of this job, from 1; with `job` it makes the Celery task id, never used twice"""
    sequence: int
    """place in the run's order of submissions"""
    timeout_s: float
    """the body ends after this long; whoever enforces it from outside adds GRACE_S"""

    @property
    def task_id(self) -> str:
        return str(TaskId(self.run, self.job, self.attempt))


class RolloutJob(Job):
    queue: Literal[Queue.ROLLOUTS] = Queue.ROLLOUTS
    group: str
    environment: str
    example: int
    seed: int
    policy_version: int = 0
    """the newest that the trainer had published when this was submitted"""


class ScoreJob(Job):
    """Rewards for a whole group, by the environment that played it."""

    queue: Literal[Queue.ROLLOUTS] = Queue.ROLLOUTS
    environment: str
    plan: str
    """key of the group's plan in the store"""


class SurveyJob(Job):
    """How large an environment is: asked once, because only workers load environments."""

    queue: Literal[Queue.ROLLOUTS] = Queue.ROLLOUTS
    environment: str


class FilterJob(Job):
    queue: Literal[Queue.FILTERING] = Queue.FILTERING
    plan: str
    """key of the group's plan in the store"""


class AdvantageJob(Job):
    queue: Literal[Queue.ADVANTAGES] = Queue.ADVANTAGES
    plan: str


class EncodeJob(Job):
    queue: Literal[Queue.ENCODING] = Queue.ENCODING
    plan: str
    """key of the step's plan in the store"""
    step: int
    data_rank: int


AnyJob = RolloutJob | ScoreJob | SurveyJob | FilterJob | AdvantageJob | EncodeJob


class RolloutResult(Message):
    answers: Literal["rollout"] = "rollout"
    reward: FiniteFloat
    rewards: Annotated[dict[Name, FiniteFloat], Field(max_length=REWARDS_LIMIT)] = {}
    """named parts of the reward"""
    policy_error: Annotated[str, Field(max_length=POLICY_ERROR_CHARACTERS)] | None = None
    """what the policy did wrong (time-out, context limit, ...): scored, in the baseline, never tried again"""
    columns: BlobRef | None = None
    """None only where there is nothing to train on"""
    experts: BlobRef | None = None
    """None when no routed rows came"""
    sample_lengths: Annotated[tuple[int, ...], Field(max_length=SAMPLES_LIMIT)] = ()
    """tokens of each sample"""
    version_first: int = 0
    """policy version that sampled the first token"""
    version_last: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    """of the turns that began a sample"""
    tool_tokens: int = 0
    """context that came later: what tools and users said between the turns"""
    completion_tokens: int = 0
    truncated: bool = False
    metrics: Annotated[dict[Name, FiniteFloat], Field(max_length=METRICS_LIMIT)] = {}

    @property
    def keys(self) -> list[str]:
        return [blob.key for blob in (self.columns, self.experts) if blob]

    @property
    def stored_bytes(self) -> int:
        return sum(blob.size for blob in (self.columns, self.experts) if blob)


class ScoreResult(Message):
    answers: Literal["score"] = "score"
    rewards: dict[str, FiniteFloat]


class SurveyResult(Message):
    answers: Literal["survey"] = "survey"
    examples: int
    scores_groups: bool


class FilterResult(Message):
    answers: Literal["filter"] = "filter"
    dropped: dict[str, str] = {}
    """rollout -> the reason that drops it"""
    masked: tuple[str, ...] = ()
    """rollouts that are delivered with loss mask 0"""
    matched: dict[str, int] = {}
    """filter -> how many rollouts it matched, whatever its mode"""


class AdvantageResult(Message):
    answers: Literal["advantage"] = "advantage"
    advantages: dict[str, FiniteFloat] = {}
    dropped: str | None = None
    """the reason why the whole group is of no use (zero variance)"""
    masked: bool = False
    """the whole group is delivered with loss mask 0"""


class EncodeResult(Message):
    """The rank's file, or why there is none: rollouts whose columns are gone or damaged."""

    answers: Literal["encode"] = "encode"
    rank: EncodedRank | None = None
    unreadable: Annotated[tuple[str, ...], Field(max_length=UNREADABLE_LIMIT)] = ()


AnyResult = RolloutResult | ScoreResult | SurveyResult | FilterResult | AdvantageResult | EncodeResult
Result = Annotated[AnyResult, Field(discriminator="answers")]


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    """counts towards `max_failures`"""
    UNREACHABLE = "unreachable"
    """the engine is away: counts as nothing, submission pauses"""
    UNWRITTEN = "unwritten"
    """the store takes nothing: likewise"""
    RELEASED = "released"
    """the worker is stopping: submitted again at once, counts as nothing"""


class Reply(Message):
    run: str
    job: str
    attempt: int
    execution: str
    """random id of this execution of the message: one message may be executed twice"""
    worker: str
    outcome: Outcome
    result: Result | None = None
    error: Annotated[str, Field(max_length=ERROR_CHARACTERS)] | None = None
    duration_s: float = 0.0


class GroupMember(Message):
    rollout: str
    result: RolloutResult


class GroupPlan(Message):
    """A group's finished rollouts, kept in the store because a group may be large."""

    group: str
    environment: str
    example: int
    policy_version: int
    """the newest when the plan was written"""
    members: list[GroupMember]


def shortened(error: str, characters: int = ERROR_CHARACTERS) -> str:
    return error if len(error) <= characters else error[: characters - 1] + "…"
