"""The states of rollouts, groups, jobs and batches, and the transitions of a rollout. An illegal one raises."""

from enum import StrEnum

from headpond.errors import IllegalTransition


class LedgerEnum(StrEnum):
    """Hashed as its text: `Enum.__hash__` is a Python function, and states are keys of every count."""

    __hash__ = str.__hash__


class Purpose(LedgerEnum):
    """What a group is played for."""

    TRAINING = "training"
    EVALUATION = "evaluation"


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
    # the end of every rollout of an evaluation; its reason is why it has no score
    EVALUATED = "evaluated"


class GroupState(LedgerEnum):
    """While a stage works on a group, its state is the name of that stage. `play` is the first."""

    PLAYING = "play"
    ADMITTED = "admitted"
    BATCHED = "batched"
    EVALUATED = "evaluated"  # its evaluation is not done yet
    CLOSED = "closed"  # delivered, dropped or evaluated


# States of groups that no stage works on.
FINISHED = frozenset({GroupState.ADMITTED, GroupState.BATCHED, GroupState.EVALUATED, GroupState.CLOSED})


class JobState(LedgerEnum):
    WAITING = "waiting"  # to be submitted, for the first time or again
    SUBMITTED = "submitted"
    SETTLED = "settled"
    DEAD = "dead"  # its attempts are used up
    CANCELLED = "cancelled"  # no longer needed


class BatchState(LedgerEnum):
    COMPOSED = "composed"
    DELIVERED = "delivered"
    TRAINED = "trained"


_R = RolloutState
TRANSITIONS: dict[RolloutState, frozenset[RolloutState]] = {
    _R.PLANNED: frozenset({_R.SUBMITTED, _R.FILTERED, _R.EVALUATED}),
    # submitted -> generated: a reply may arrive before a poll reads the lease.
    _R.SUBMITTED: frozenset({_R.RUNNING, _R.GENERATED, _R.FILTERED, _R.DEAD, _R.EVALUATED}),
    _R.RUNNING: frozenset({_R.SUBMITTED, _R.GENERATED, _R.FILTERED, _R.DEAD, _R.EVALUATED}),
    _R.GENERATED: frozenset({_R.FILTERED, _R.ADMITTED, _R.DEAD, _R.EVALUATED}),
    _R.ADMITTED: frozenset({_R.BATCHED, _R.FILTERED}),
    _R.BATCHED: frozenset({_R.ADMITTED, _R.DELIVERED}),
    _R.DELIVERED: frozenset({_R.TRAINED}),
    _R.FILTERED: frozenset(),
    _R.TRAINED: frozenset(),
    _R.DEAD: frozenset(),
    _R.EVALUATED: frozenset(),
}
# where a rollout of training ends -> state and reason of an evaluation's rollout
EVALUATION_ENDS = {_R.FILTERED: (_R.EVALUATED, "cancelled"), _R.DEAD: (_R.EVALUATED, "dead")}
# states of rollouts whose files are not read again
UNREAD = frozenset({_R.FILTERED, _R.DEAD, _R.EVALUATED})
IN_FLIGHT = frozenset({_R.PLANNED, _R.SUBMITTED, _R.RUNNING, _R.GENERATED, _R.ADMITTED, _R.BATCHED})
UNGENERATED = frozenset({_R.PLANNED, _R.SUBMITTED, _R.RUNNING})


def check(rollout: str, old: RolloutState, new: RolloutState) -> None:
    if new not in TRANSITIONS[old]:
        raise IllegalTransition(f"rollout {rollout} cannot go from {old} to {new}")
