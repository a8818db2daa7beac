"""The records of open evaluations, and how they are read back when a run is resumed."""

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from headpond import ids
from headpond.ledger import evaluations as queries
from headpond.ledger.evaluations import EvaluationState, PlayState
from headpond.orchestrator.ledger.rows import BatchRecord, GroupRecord, JobRecord, RolloutRecord, Row
from headpond.records.rollout import RolloutResult


@dataclass(kw_only=True, eq=False)
class EvaluationRecord:
    number: int
    name: str
    version: int
    """policy version of the engine's weights when it began"""
    examples: int
    rollouts: int
    """of each example"""
    started_at: float
    """seconds since the epoch"""
    state: EvaluationState = EvaluationState.OPEN
    finished: int | None = None
    result: str | None = None
    """JSON: its values when it is done"""
    begun: int = 0
    """rollouts that have a job or had one"""
    open: set[int] = field(default_factory=set[int])
    """numbers of its rollouts that have no score yet"""
    unscored: dict[int, RolloutResult] = field(default_factory=dict[int, RolloutResult])
    """number of an open rollout -> its result, which waits for the score of its example"""
    scores: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """number of a rollout -> what is kept of its result"""

    @property
    def size(self) -> int:
        return self.examples * self.rollouts

    def of_example(self, example: int) -> range:
        """Numbers of its rollouts."""
        return range(example * self.rollouts, (example + 1) * self.rollouts)

    def row(self) -> Row:
        return (self.number, self.name, self.version, self.examples, self.rollouts, self.started_at, self.state,
                self.finished, self.result)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationRollout:
    evaluation: int
    index: int
    state: PlayState
    result: str | None = None

    def row(self) -> Row:
        return (self.evaluation, self.index, self.state, self.result)


@dataclass(frozen=True, kw_only=True, eq=False)
class ClosedEvaluation:
    number: int

    def row(self) -> Row:
        return (self.number,)


AnyRecord = (
    RolloutRecord | GroupRecord | JobRecord | BatchRecord | EvaluationRecord | EvaluationRollout | ClosedEvaluation
)
"""of the ledger: each returns its row"""


def read_open(connection: sqlite3.Connection) -> Iterator[EvaluationRecord]:
    for number, name, version, examples, rollouts, started_at, state, finished, result in queries.open_evaluations(
        connection
    ):
        record = EvaluationRecord(
            number=number, name=name, version=version, examples=examples, rollouts=rollouts, started_at=started_at,
            state=EvaluationState(state), finished=finished, result=result,
        )  # fmt: skip
        for index, played, score in queries.rollouts_of(connection, number):
            record.begun += 1
            if played in (PlayState.OPEN, PlayState.GENERATED):
                record.open.add(index)
            if played == PlayState.GENERATED:
                record.unscored[index] = RolloutResult.model_validate_json(score)
            elif played == PlayState.EVALUATED:
                record.scores[index] = orjson.loads(score)
        yield record


def is_open(evaluations: Mapping[int, EvaluationRecord], rollout: str) -> bool:
    """Whether the files of this rollout of an evaluation are in use."""
    id = ids.RolloutId.parse(rollout)
    record = evaluations.get(int(id.group[1:]))
    return record is not None and id.number in record.open
