"""The states of rollouts, groups, jobs and batches, and the transitions of a rollout. An illegal one raises."""

from enum import StrEnum

from headpond.errors import IllegalTransition
from headpond.queues import Queue


class LedgerEnum(StrEnum):
    """Hashed as its text: `Enum.__hash__` is a Python function, and states are keys of every count."""

    __hash__ = str.__hash__


class RolloutState(LedgerEnum):
    PLANNED = "planned"
    SUBMITTED = "submitted"
    RUNNING = "running"
    GENERATED = "generated"
    FILTERED = "filtered"
    ADMITTED = "admitted"
    BATCHED = "batched"
    DELIVERED = "delivered"
    TRAINED = "trained"
    DEAD = "dead"


class GroupState(LedgerEnum):
    COLLECTING = "collecting"
    SCORING = "scoring"
    FILTERING = "filtering"
    ESTIMATING = "estimating"
    ADMITTED = "admitted"
    BATCHED = "batched"
    CLOSED = "closed"
    """delivered or dropped"""


class JobKind(LedgerEnum):
    """The values are those of the results' field `answers` (`messages.py`), but for those of evaluations."""

    SURVEY = "survey"
    ROLLOUT = "rollout"
    EVALUATION = "evaluation"
    """a rollout of an evaluation: its result is that of a rollout"""
    SCORE = "score"
    EVALUATION_SCORE = "evaluation_score"
    """of the rollouts of one example of an evaluation"""
    FILTER = "filter"
    ADVANTAGE = "advantage"
    DRAW = "draw"
    BATCH_PHASE = "batch_phase"
    ENCODE = "encode"

    @property
    def answer(self) -> str:
        """`answers` of its result."""
        return {JobKind.EVALUATION: "rollout", JobKind.EVALUATION_SCORE: "score"}.get(self, self.value)

    @property
    def queue(self) -> Queue:
        return _QUEUES[self]


_QUEUES = {
    JobKind.SURVEY: Queue.ROLLOUTS,
    JobKind.ROLLOUT: Queue.ROLLOUTS,
    JobKind.EVALUATION: Queue.ROLLOUTS,
    JobKind.SCORE: Queue.ROLLOUTS,
    JobKind.EVALUATION_SCORE: Queue.ROLLOUTS,
    JobKind.FILTER: Queue.FILTERING,
    JobKind.ADVANTAGE: Queue.ADVANTAGES,
    JobKind.DRAW: Queue.ADVANTAGES,
    JobKind.BATCH_PHASE: Queue.ADVANTAGES,
    JobKind.ENCODE: Queue.ENCODING,
}
FORGOTTEN_JOBS = frozenset({JobKind.SURVEY, JobKind.DRAW, JobKind.EVALUATION, JobKind.EVALUATION_SCORE})
"""Their rows are deleted when they end: other records have what they did."""
STEP_JOBS = frozenset({JobKind.BATCH_PHASE, JobKind.ENCODE})
"""Their subject is a step."""


class JobState(LedgerEnum):
    WAITING = "waiting"
    """to be submitted, for the first time or again"""
    SUBMITTED = "submitted"
    SETTLED = "settled"
    DEAD = "dead"
    """its attempts are used up"""
    CANCELLED = "cancelled"
    """no longer needed"""


class BatchState(LedgerEnum):
    COMPOSED = "composed"
    DELIVERED = "delivered"
    TRAINED = "trained"


_R = RolloutState
TRANSITIONS: dict[RolloutState, frozenset[RolloutState]] = {
    _R.PLANNED: frozenset({_R.SUBMITTED, _R.FILTERED}),
    # submitted -> generated: a reply may arrive before a poll reads the lease.
    _R.SUBMITTED: frozenset({_R.RUNNING, _R.GENERATED, _R.FILTERED, _R.DEAD}),
    _R.RUNNING: frozenset({_R.SUBMITTED, _R.GENERATED, _R.FILTERED, _R.DEAD}),
    _R.GENERATED: frozenset({_R.FILTERED, _R.ADMITTED, _R.DEAD}),
    _R.ADMITTED: frozenset({_R.BATCHED, _R.FILTERED}),
    _R.BATCHED: frozenset({_R.ADMITTED, _R.DELIVERED}),
    _R.DELIVERED: frozenset({_R.TRAINED}),
    _R.FILTERED: frozenset(),
    _R.TRAINED: frozenset(),
    _R.DEAD: frozenset(),
}
IN_FLIGHT = frozenset({_R.PLANNED, _R.SUBMITTED, _R.RUNNING, _R.GENERATED, _R.ADMITTED, _R.BATCHED})
UNGENERATED = frozenset({_R.PLANNED, _R.SUBMITTED, _R.RUNNING})


def check(rollout: str, old: RolloutState, new: RolloutState) -> None:
    if new not in TRANSITIONS[old]:
        raise IllegalTransition(f"rollout {rollout} cannot go from {old} to {new}")
