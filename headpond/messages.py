"""Messages between processes: jobs to the workers, replies to the orchestrator. A job is at most 4 KB of JSON, a reply
4.8 KB, except the scores of a group with named rewards and the draws of a sampler.

No message contains a path, a class or code: keys are relative to the store of each process's own configuration, and the
worker's own configuration resolves the names of environments.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from headpond import ids
from headpond.batches.manifest import AGENT_CHARACTERS, EncodedRank
from headpond.batches.plan import step_directory
from headpond.errors import MalformedId
from headpond.ids import TaskId
from headpond.queues import Queue
from headpond.replica_use import REPLICAS_LIMIT, URL_CHARACTERS, ReplicaUse
from headpond.sampling import STATE_LIMIT_BYTES, PlayedGroup
from headpond.store import BlobRef
from headpond.store.base import is_key

MESSAGE_LIMIT_BYTES = 4096
REPLY_LIMIT_BYTES = 1 << 20  # of a group's scores, which grow with `rollouts.group_size`
GRACE_S = 20.0  # for a body to store its results after its own time-out
ERROR_CHARACTERS = 600  # a cause and what to do; the traceback stays in the worker's log
METRICS_LIMIT = 37
REWARDS_LIMIT = 8
AGENTS_LIMIT = 4
SAMPLES_LIMIT = 128  # of one rollout; a step is packed by their lengths, before any token is read
POLICY_ERROR_CHARACTERS = 120
UNREADABLE_LIMIT = 64  # rollouts named in one reply; the step is formed again without them and may name more
NAME_CHARACTERS = 32
ABANDONED_LIMIT = 4  # replicas differ by one version, at most a few, when a trainer goes back
DRAWN_LIMIT = 1024  # examples of one draw

Name = Annotated[str, Field(max_length=NAME_CHARACTERS)]
ReplicaUses = Annotated[
    dict[Annotated[str, Field(max_length=URL_CHARACTERS)], ReplicaUse], Field(max_length=REPLICAS_LIMIT)
]
"""Replica of the engine -> what the rollout used of it, and what its failures cost."""
AgentName = Annotated[str, Field(max_length=AGENT_CHARACTERS)]


class WireModel(BaseModel):
    # Validation errors appear in logs and in Flower: they show what is wrong, without the content.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Job(WireModel):
    """One submission of one unit of work."""

    run: str
    """id of the run"""
    job: str
    attempt: int
    """counts the submissions of this job, from 1; part of the Celery task id, which is never used twice"""
    sequence: int
    """position in the run's order of submissions"""
    timeout_s: float
    """after which the body ends itself; the orchestrator and Celery enforce it with GRACE_S added"""

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
    """newest version that the trainer had published at submission"""
    least_version: int = 0
    """replicas with older weights serve nothing that is trained on"""
    abandoned_versions: Annotated[tuple[int, ...], Field(max_length=ABANDONED_LIMIT)] = ()
    """nor do replicas with these: the trainer has resumed from an older checkpoint"""


class ScoreJob(Job):
    """Rewards of a whole group, computed by the environment that played it."""

    queue: Literal[Queue.ROLLOUTS] = Queue.ROLLOUTS
    environment: str
    plan: str
    """key of the group's GroupInputs in the store"""


class SurveyJob(Job):
    """The number of an environment's examples, which only workers can count. One job per start of the orchestrator."""

    queue: Literal[Queue.ROLLOUTS] = Queue.ROLLOUTS
    environment: str


class FilterJob(Job):
    queue: Literal[Queue.FILTERING] = Queue.FILTERING
    plan: str
    """key of the group's GroupInputs in the store"""


class AdvantageJob(Job):
    queue: Literal[Queue.ADVANTAGES] = Queue.ADVANTAGES
    plan: str
    """key of the group's GroupInputs in the store"""


class BatchPhaseJob(Job):
    """The estimator's batch phase, over the rollouts of one step."""

    queue: Literal[Queue.ADVANTAGES] = Queue.ADVANTAGES
    plan: str
    """key of the step's StepValues in the store"""
    step: int
    formation: int


class DrawJob(Job):
    """A sampler draws the next examples of an environment."""

    queue: Literal[Queue.ADVANTAGES] = Queue.ADVANTAGES
    environment: str
    plan: str
    """key of the DrawInputs in the store"""


class EncodeJob(Job):
    queue: Literal[Queue.ENCODING] = Queue.ENCODING
    plan: str
    """key of the step's BatchPlan in the store"""
    step: int
    data_rank: int


AnyJob = RolloutJob | ScoreJob | SurveyJob | FilterJob | AdvantageJob | BatchPhaseJob | DrawJob | EncodeJob


class RolloutResult(WireModel):
    answers: Literal["rollout"] = "rollout"
    reward: FiniteFloat
    rewards: Annotated[dict[Name, FiniteFloat], Field(max_length=REWARDS_LIMIT)] = {}
    """named parts of the reward"""
    agent_rewards: Annotated[dict[AgentName, FiniteFloat], Field(max_length=AGENTS_LIMIT)] = {}
    policy_error: Annotated[str, Field(max_length=POLICY_ERROR_CHARACTERS)] | None = None
    """failure caused by the policy (time-out, context limit, ...): scored, in the baseline, never retried"""
    columns: BlobRef | None = None
    """None only if there is nothing to train on"""
    experts: BlobRef | None = None
    """None if the engine sent no routed experts"""
    credit: str | None = None
    """key of the file with a value for each turn, beside `columns`; set when the group phase is done"""
    sample_lengths: Annotated[tuple[int, ...], Field(max_length=SAMPLES_LIMIT)] = ()
    """tokens of each sample"""
    version_first: int = 0
    """lowest policy version that may have sampled one of its tokens"""
    version_last: int = 0
    """the highest one"""
    inexact_tokens: int = 0
    """completion tokens whose version is a range, or was not said by the engine"""
    turns: int = 0
    prompt_tokens: int = 0
    """in the prompts of the turns that began a sample"""
    tool_tokens: int = 0
    """in later context: messages of tools and users between the turns"""
    completion_tokens: int = 0
    truncated: bool = False
    hit_max_tokens: bool = False
    """whether a limit of tokens ended the last turn: `max_tokens`, or the engine's context length"""
    agents: Annotated[dict[AgentName, int], Field(max_length=AGENTS_LIMIT)] = {}
    """completion tokens of each agent that the environment named, in the order of their first turns"""
    metrics: Annotated[dict[Name, FiniteFloat], Field(max_length=METRICS_LIMIT)] = {}
    replica_uses: Annotated[ReplicaUses, Field(exclude=True)] = {}
    """sent in the reply: the ledger does not keep it with the rollout"""

    @property
    def keys(self) -> list[str]:
        return [blob.key for blob in (self.columns, self.experts) if blob] + ([self.credit] if self.credit else [])

    def is_confined_to(self, reply: "Reply") -> bool:
        directory = ids.execution_directory(reply.run, reply.job, reply.attempt, reply.execution)
        return all(is_key(key) and key.rpartition("/")[0] == directory for key in self.keys)

    @property
    def stored_bytes(self) -> int:
        return sum(blob.size for blob in (self.columns, self.experts) if blob)


class ScoreResult(WireModel):
    answers: Literal["score"] = "score"
    rewards: dict[str, FiniteFloat]
    named: Annotated[dict[Name, dict[str, FiniteFloat]], Field(max_length=REWARDS_LIMIT)] = {}
    """name -> rollout -> that part of its reward"""


class SurveyResult(WireModel):
    answers: Literal["survey"] = "survey"
    examples: int
    scores_groups: bool


class FilterResult(WireModel):
    answers: Literal["filter"] = "filter"
    dropped: dict[str, str] = {}
    """rollout -> the reason that drops it"""
    masked: tuple[str, ...] = ()
    """rollouts to deliver with loss mask 0"""
    matched: dict[str, int] = {}
    """filter -> number of rollouts it matched, in any mode"""


class AdvantageResult(WireModel):
    answers: Literal["advantage"] = "advantage"
    advantages: dict[str, FiniteFloat] = {}
    dropped: str | None = None
    """reason that drops the whole group, e.g. zero variance"""
    masked: bool = False
    """deliver the whole group with loss mask 0"""
    credit: str | None = None
    """execution that wrote the values of the turns into a file beside each rollout's columns; None without"""


class DrawResult(WireModel):
    answers: Literal["draw"] = "draw"
    examples: Annotated[tuple[int, ...], Field(max_length=DRAWN_LIMIT)]
    """none: the data has ended"""
    state: Annotated[str, Field(max_length=STATE_LIMIT_BYTES)]
    """the sampler's state after this draw: JSON text that only `headpond.sampling` reads"""


class BatchPhaseResult(WireModel):
    answers: Literal["batch_phase"] = "batch_phase"
    execution: str
    """that wrote the step's StepAdvantages: part of the file's key in the store"""

    def is_confined_to(self, reply: "Reply") -> bool:
        return self.execution == reply.execution


class EncodeResult(WireModel):
    """The rank's file, or the rollouts whose missing or damaged columns prevented it."""

    answers: Literal["encode"] = "encode"
    rank: EncodedRank | None = None
    unreadable: Annotated[tuple[str, ...], Field(max_length=UNREADABLE_LIMIT)] = ()

    def is_confined_to(self, reply: "Reply") -> bool:
        if self.rank is None:
            return True
        try:
            job = ids.EncodeJobId.parse(reply.job)
        except MalformedId:
            return False
        directory = step_directory(job.step)
        names = f"{directory}/rank_{job.data_rank:02d}.{reply.execution}.", f"{directory}/rollouts.{reply.execution}."
        keys = [ref.key for ref in (self.rank.file, self.rank.rollouts_jsonl) if ref]
        own = all(is_key(key) and key.startswith(names) and key.rpartition("/")[0] == directory for key in keys)
        return own and self.rank.data_rank == job.data_rank


StepResult = BatchPhaseResult | EncodeResult
"""Kept in the ledger until the step is sealed."""
AnyResult = RolloutResult | ScoreResult | SurveyResult | FilterResult | AdvantageResult | DrawResult | StepResult
Result = Annotated[AnyResult, Field(discriminator="answers")]


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    """counts towards `max_failures`"""
    UNREACHABLE = "unreachable"
    """no engine answered: not counted, submission pauses"""
    UNWRITTEN = "unwritten"
    """the store could not be written: not counted, submission pauses"""
    RELEASED = "released"
    """the worker is stopping: submitted again at once, not counted"""
    DECLINED = "declined"
    """the worker has other settings, or failed this job before: submitted again after a pause, not counted"""


class Reply(WireModel):
    run: str
    job: str
    attempt: int
    execution: str
    """random id of this execution: a message may be executed twice"""
    worker: str
    """host and process that executed it"""
    node: str
    """Celery's name of that worker"""
    settings: str
    """digest of the settings that the worker used"""
    outcome: Outcome
    result: Result | None = None
    error: Annotated[str, Field(max_length=ERROR_CHARACTERS)] | None = None
    duration_s: float = 0.0
    replica_uses: ReplicaUses = {}
    """of a rollout, whatever its outcome"""

    @property
    def names_own_files(self) -> bool:
        """Whether every file in its result was written by the execution that it answers for."""
        result = self.result
        if isinstance(result, AdvantageResult):
            return result.credit in (None, self.execution)
        return not isinstance(result, RolloutResult | StepResult) or result.is_confined_to(self)


class GroupMember(WireModel):
    rollout: str
    result: RolloutResult


class GroupInputs(WireModel):
    """What the jobs of a group read: its finished rollouts. A file in the store, because a group may be large."""

    group: str
    environment: str
    example: int
    policy_version: int
    """newest version when the file was written"""
    members: list[GroupMember]


class DrawInputs(WireModel):
    """What a sampler reads. A file in the store."""

    environment: str
    size: int
    """examples of the environment"""
    seed: int
    count: int
    """examples to draw"""
    played: list[PlayedGroup]
    """groups that ended since the draw before"""
    state: str | None
    """the sampler's state after the draw before"""


class StepValues(WireModel):
    """What the batch phase reads: a step's rollouts in the order of their ids, one entry each, and the state. A file in
    the store."""

    rollouts: list[str]
    groups: list[str]
    environments: list[str]
    examples: list[int]
    values: list[float]
    """results of the group phase"""
    rewards: list[float]
    named_rewards: list[dict[str, float]]
    failed: list[bool]
    """whether the policy failed"""
    agents: list[dict[str, int]]
    agent_rewards: list[dict[str, float]] = []
    credit: list[str | None] = []
    """keys of the files with the values of the turns; none if the estimator does not answer per turn"""
    completion_tokens: list[int]
    state: str | None
    """the estimator's state after the step before: JSON text that only `headpond.advantages` reads"""


class StepAdvantages(WireModel):
    """What the batch phase writes: a file in the store, because a step may be large."""

    advantages: dict[str, FiniteFloat]
    state: str | None
    """the estimator's state after this step"""
    credit: str | None = None
    """key of the file with the advantages of the turns; None without"""


def shortened(error: str, characters: int = ERROR_CHARACTERS) -> str:
    """The text as a message may carry it: at most `characters` long, with lone surrogates escaped."""
    error = error[: characters + 1].encode(errors="backslashreplace").decode()
    return error if len(error) <= characters else error[: characters - 1] + "…"
