"""The ledger's tables of evaluations, apart from those of training rollouts: no count of a step includes them."""

import sqlite3
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

Row = tuple[Any, ...]


class EvaluationState(StrEnum):
    OPEN = "open"
    DONE = "done"
    CANCELLED = "cancelled"


class PlayState(StrEnum):
    """Of a rollout of an evaluation."""

    OPEN = "open"
    GENERATED = "generated"
    """its example's rollouts are scored together when all are in"""
    EVALUATED = "evaluated"
    DEAD = "dead"
    CANCELLED = "cancelled"


# `finished` counts the evaluations that are done, in the order of their ends.
TABLES = """
CREATE TABLE evaluations (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, version INTEGER NOT NULL, examples INTEGER NOT NULL,
    rollouts INTEGER NOT NULL, started_at REAL NOT NULL, state TEXT NOT NULL, finished INTEGER, result TEXT
);
CREATE TABLE evaluation_rollouts (
    evaluation INTEGER, idx INTEGER, state TEXT NOT NULL, result TEXT, PRIMARY KEY (evaluation, idx)
) WITHOUT ROWID;
CREATE INDEX open_evaluations ON evaluations (number) WHERE state = 'open';
CREATE UNIQUE INDEX finished_evaluations ON evaluations (finished) WHERE finished IS NOT NULL;
"""
STATEMENTS = {
    "evaluations": "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "evaluation_rollouts": "INSERT OR REPLACE INTO evaluation_rollouts VALUES (?, ?, ?, ?)",
    # The evaluation has the means; of each rollout, the reward is kept.
    "closed_evaluations": "UPDATE evaluation_rollouts SET result = json_extract(result, '$.reward') "
    "WHERE evaluation = ? AND state = 'evaluated' AND json_type(result) = 'object'",
}


def open_evaluations(connection: sqlite3.Connection) -> list[Row]:
    """All columns."""
    return connection.execute("SELECT * FROM evaluations WHERE state = 'open' ORDER BY number").fetchall()


def rollouts_of(connection: sqlite3.Connection, evaluation: int) -> Iterator[Row]:
    """(index, state, result) of every rollout that has begun."""
    query = "SELECT idx, state, result FROM evaluation_rollouts WHERE evaluation = ? ORDER BY idx"
    return connection.execute(query, (evaluation,))


def results_after(connection: sqlite3.Connection, finished: int) -> list[tuple[int, str]]:
    """(finished, result) of the evaluations that ended later, in the order of their ends."""
    query = "SELECT finished, result FROM evaluations WHERE finished > ? ORDER BY finished"
    return connection.execute(query, (finished,)).fetchall()


def problems(connection: sqlite3.Connection, *, limit: int) -> list[str]:
    """Open rollouts that have no job."""
    rows = connection.execute(
        "SELECT evaluation, idx FROM evaluation_rollouts JOIN evaluations ON evaluation = number "
        "LEFT JOIN jobs ON jobs.id = printf('v%06d-%d', evaluation, idx) AND jobs.state IN ('waiting', 'submitted') "
        "WHERE evaluations.state = 'open' AND evaluation_rollouts.state = 'open' AND jobs.id IS NULL LIMIT ?",
        (limit,),
    )
    return [f"rollout {index} of evaluation {number} is open and has no job" for number, index in rows]
