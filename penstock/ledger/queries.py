"""Read-only queries of the ledger, shared by orchestrator, command line, benchmarks and dashboard.

Every function takes an open connection (`schema.reading`) and changes nothing.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from penstock.ids import RolloutId
from penstock.ledger.states import IN_FLIGHT, STEP_JOBS, BatchState, JobState, RolloutState

Row = tuple[Any, ...]

ROLLOUT = "rollouts.grp || '-' || rollouts.idx"
"""SQL for a rollout's id"""
RELEASED = ("experts_released", "columns_released", "jsonl_released", "manifests_released")
"""counters of steps whose files of one kind are released"""
STRUCTURE_CHECKS = {
    "rollout {} belongs to no group": f"""
        SELECT {ROLLOUT} FROM rollouts LEFT JOIN groups ON grp = id WHERE id IS NULL""",
    "rollout {} is open in a closed group": f"""
        SELECT {ROLLOUT} FROM rollouts JOIN groups ON grp = id WHERE groups.state = 'closed'
        AND rollouts.state NOT IN ('filtered', 'delivered', 'trained', 'dead')""",
    "rollout {} is open and has no job": f"""
        SELECT {ROLLOUT} FROM rollouts LEFT JOIN jobs ON jobs.id = {ROLLOUT}
        WHERE rollouts.state IN ('planned', 'submitted', 'running')
        AND coalesce(jobs.state, '') NOT IN ('waiting', 'submitted')""",
    "group {} is in a stage and has no job": """
        SELECT groups.id FROM groups LEFT JOIN jobs ON subject = groups.id
        AND kind IN ('score', 'filter', 'advantage') AND jobs.state IN ('waiting', 'submitted')
        WHERE groups.state IN ('scoring', 'filtering', 'estimating') AND jobs.id IS NULL""",
    "rollout {} is batched for a step that is not open": f"""
        SELECT {ROLLOUT} FROM rollouts LEFT JOIN batches USING (step)
        WHERE rollouts.state = 'batched' AND coalesce(batches.state, '') != 'composed'""",
    "rollout {} has a step and is in no batch": f"""
        SELECT {ROLLOUT} FROM rollouts WHERE step IS NOT NULL AND state NOT IN ('batched', 'delivered', 'trained')""",
}
"""problem -> query for the ids that have it. Every rollout has a group; every open one has a job that will move it."""


@contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Queries inside see the ledger of one moment; each query outside sees the newest commit."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")


# counts: what status, audit and the reporter show


def balance(planned: int, states: Counter[RolloutState], reasons: Counter[str], fenced: int) -> dict[str, Any]:
    """`planned = delivered + filtered + in_flight + dead`, where delivered includes trained."""
    delivered = states[RolloutState.DELIVERED] + states[RolloutState.TRAINED]
    in_flight = sum(states[state] for state in IN_FLIGHT)
    dead = states[RolloutState.DEAD]
    return {
        "planned": planned,
        "delivered": delivered,
        "filtered": dict(sorted(reasons.items())),
        "in_flight": in_flight,
        "dead": dead,
        "fenced": fenced,
        "balanced": planned == delivered + sum(reasons.values()) + in_flight + dead,
    }


def progress(connection: sqlite3.Connection) -> dict[str, Any]:
    """The part of a run's status that the ledger holds: delivered steps, the balance, rollouts by state."""
    values, states, reasons = meta(connection), rollouts_by_state(connection), rollouts_by_reason(connection)
    return {
        "step": values.get("steps_delivered", 0),
        "rollouts": balance(values.get("rollouts_planned", 0), states, reasons, values.get("fenced", 0)),
        "states": {state.value: states[state] for state in RolloutState if states[state]},
    }


def meta(connection: sqlite3.Connection) -> dict[str, Any]:
    """The counters and values of the whole run."""
    return dict(connection.execute("SELECT key, value FROM meta").fetchall())


def rollouts_by_state(connection: sqlite3.Connection) -> Counter[RolloutState]:
    return Counter({RolloutState(state): number for state, number in _count_by(connection, "state")})


def rollouts_by_reason(connection: sqlite3.Connection) -> Counter[str]:
    """Filtered rollouts by the reason of their drop."""
    return Counter(dict(_count_by(connection, "reason")))


def _count_by(connection: sqlite3.Connection, column: Literal["state", "reason"]) -> list[tuple[str, int]]:
    return connection.execute(
        f"SELECT {column}, count(*) FROM rollouts WHERE {column} IS NOT NULL GROUP BY {column}"
    ).fetchall()


def untrained_steps(connection: sqlite3.Connection) -> dict[int, int]:
    """Delivered step -> the number of its rollouts, for steps that the trainer has not acknowledged."""
    query = "SELECT step, count(*) FROM rollouts WHERE state = 'delivered' GROUP BY step"
    return dict(connection.execute(query).fetchall())


def released_steps(connection: sqlite3.Connection) -> dict[str, int]:
    """Counter of RELEASED -> the first step whose files of that kind are still there."""
    values = meta(connection)
    return {counter: values.get(counter, 0) for counter in RELEASED}


def dead_jobs(connection: sqlite3.Connection, *, limit: int) -> list[dict[str, Any]]:
    """Why jobs died, the most frequent cause first."""
    rows = connection.execute(
        "SELECT kind, error, count(*) FROM jobs WHERE state = 'dead' GROUP BY kind, error ORDER BY 3 DESC LIMIT ?",
        (limit,),
    )
    return [{"kind": kind, "error": error, "jobs": jobs} for kind, error, jobs in rows]


def last_event_at(connection: sqlite3.Connection, action: str) -> float | None:
    """When `action` last happened, in seconds since the epoch."""
    return connection.execute("SELECT max(at) FROM events WHERE action = ?", (action,)).fetchone()[0]


# checks: what audit compares


def structure_problems(connection: sqlite3.Connection, *, limit: int) -> Iterator[str]:
    """At most `limit` problems of each kind."""
    for problem, query in STRUCTURE_CHECKS.items():
        for (subject,) in connection.execute(f"{query} LIMIT {limit}"):
            yield problem.format(subject)


def delivered_rollouts(connection: sqlite3.Connection, *, from_step: int = 0) -> Iterator[tuple[int, str]]:
    """(step, rollout) of every delivered rollout, trained ones included, in the order of steps."""
    query = f"""
        SELECT step, {ROLLOUT} FROM rollouts WHERE state IN ('delivered', 'trained') AND step >= ? ORDER BY step"""
    return connection.execute(query, (from_step,))


def step_of(connection: sqlite3.Connection, rollout: str) -> int | None:
    """The step that a rollout was delivered in."""
    query = "SELECT step FROM rollouts WHERE grp = ? AND idx = ? AND state IN ('delivered', 'trained')"
    group, index = RolloutId.parse(rollout)
    row = connection.execute(query, (group, index)).fetchone()
    return row[0] if row else None


def delivered_steps(connection: sqlite3.Connection) -> set[int]:
    """Trained ones included."""
    query = "SELECT step FROM batches WHERE state != ?"
    return {step for (step,) in connection.execute(query, (BatchState.COMPOSED,))}


def delivered_files(
    connection: sqlite3.Connection, *, columns_from: int, experts_from: int
) -> list[tuple[str, str | None, str | None]]:
    """(rollout, key of its columns, key of its experts) for delivered steps from `columns_from` on.

    The experts' key is None before `experts_from`. Both are None in a rebuilt ledger, which has no results.
    """
    query = f"""
        SELECT {ROLLOUT}, json_extract(result, '$.columns.key'),
            CASE WHEN step >= ? THEN json_extract(result, '$.experts.key') END
        FROM rollouts WHERE state IN ('delivered', 'trained') AND step >= ?"""
    return connection.execute(query, (experts_from, columns_from)).fetchall()


def routed_experts_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of routed experts that all settled rollouts wrote, those that were filtered later included."""
    query = "SELECT coalesce(sum(json_extract(result, '$.experts.size')), 0) FROM rollouts WHERE result IS NOT NULL"
    return connection.execute(query).fetchone()[0]


# open records: what a resumed orchestrator reads


def has_tables(connection: sqlite3.Connection) -> bool:
    """False where the first start was killed before it had created them all."""
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'open_jobs'").fetchone())


def open_groups(connection: sqlite3.Connection) -> list[Row]:
    """(id, ordinal, environment, example, state), in the order of planning."""
    return connection.execute(
        "SELECT id, ordinal, environment, example, state FROM groups WHERE state != 'closed' ORDER BY ordinal"
    ).fetchall()


def rollouts_of_open_groups(connection: sqlite3.Connection) -> Iterator[Row]:
    """All columns, by group and index."""
    return connection.execute(
        "SELECT rollouts.* FROM rollouts JOIN groups ON grp = id WHERE groups.state != 'closed' ORDER BY grp, idx"
    )


def open_batches(connection: sqlite3.Connection) -> list[tuple[int, int]]:
    """(step, formation) of the steps that are composed and not delivered."""
    query = "SELECT step, formation FROM batches WHERE state = ? ORDER BY step"
    return connection.execute(query, (BatchState.COMPOSED,)).fetchall()


def open_jobs(connection: sqlite3.Connection) -> Iterator[Row]:
    """All columns of the jobs that wait or are submitted, and of every settled or dead job of a step."""
    return connection.execute(
        "SELECT * FROM jobs WHERE state IN ('waiting', 'submitted') OR kind IN (?, ?) AND state IN (?, ?) "
        "ORDER BY sequence",
        (*sorted(STEP_JOBS), JobState.SETTLED, JobState.DEAD),
    )
