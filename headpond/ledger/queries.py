"""Read-only queries of the ledger, shared by orchestrator, command line, benchmarks and dashboard.

Every function takes an open connection (`schema.reading`) and changes nothing.
"""

import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from heapq import merge
from typing import Any, NamedTuple

import orjson

from headpond.errors import MalformedId
from headpond.ids import COLUMNS_FILE, EXPERTS_FILE, GroupId, RolloutId
from headpond.ledger import archive
from headpond.ledger.state_rows import RunState
from headpond.ledger.states import IN_FLIGHT, BatchState, JobState, RolloutState

Row = tuple[Any, ...]

ROLLOUT = "rollouts.grp || '-' || rollouts.idx"  # SQL for the id of a rollout in the hot tables
DELIVERED = "rollouts.state IN ('delivered', 'trained')"
DEATHS_SHOWN = 3  # most frequent causes of death in a status
# problem -> query for the ids that have it. Every rollout has a group; every open one has a job
# that will move it.
STRUCTURE_CHECKS = {
    "rollout {} belongs to no group": f"""
        SELECT {ROLLOUT} FROM rollouts LEFT JOIN groups ON grp = id WHERE id IS NULL""",
    "rollout {} is open in a closed group": f"""
        SELECT {ROLLOUT} FROM rollouts JOIN groups ON grp = id WHERE groups.state = 'closed'
        AND rollouts.state NOT IN ('filtered', 'delivered', 'trained', 'dead', 'evaluated')""",
    "rollout {} is open and has no job": f"""
        SELECT {ROLLOUT} FROM rollouts LEFT JOIN jobs ON jobs.id = {ROLLOUT}
        WHERE rollouts.state IN ('planned', 'submitted', 'running')
        AND coalesce(jobs.state, '') NOT IN ('waiting', 'submitted')""",
    "group {} is in a stage and has no job": """
        SELECT groups.id FROM groups LEFT JOIN jobs ON subject = groups.id
        AND kind = groups.state AND jobs.state IN ('waiting', 'submitted')
        WHERE groups.state NOT IN ('play', 'admitted', 'batched', 'evaluated', 'closed') AND jobs.id IS NULL""",
    "rollout {} is batched for a step that is not open": f"""
        SELECT {ROLLOUT} FROM rollouts LEFT JOIN batches USING (step)
        WHERE rollouts.state = 'batched' AND coalesce(batches.state, '') != 'composed'""",
    "rollout {} has a step and is in no batch": f"""
        SELECT {ROLLOUT} FROM rollouts WHERE step IS NOT NULL AND state NOT IN ('batched', 'delivered', 'trained')""",
}
ARCHIVE_CHECKS = {
    "rollout {} is archived without its group": f"""
        SELECT {archive.ROLLOUT} FROM closed_rollouts LEFT JOIN closed_groups ON ordinal = grp WHERE ordinal IS NULL""",
    "rollout {} is open in the archive": f"""
        SELECT {archive.ROLLOUT} FROM closed_rollouts WHERE typeof(state) != 'integer'""",
    "rollout {} is archived as delivered in a step that is not delivered": f"""
        SELECT {archive.ROLLOUT} FROM closed_rollouts JOIN closed_groups ON ordinal = grp LEFT JOIN batches USING (step)
        WHERE closed_rollouts.state = {archive.DELIVERED} AND coalesce(batches.state, 'composed') = 'composed'""",
    "group {} is archived and open": """
        SELECT groups.id FROM groups JOIN closed_groups USING (ordinal)""",
}  # the same for closed groups; each reads the whole archive


@contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Queries inside see the ledger of one moment; each query outside sees the newest commit."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")


# counts: what status, audit and the reporter show


def balance(planned: int, states: Counter[Any], reasons: Counter[str], fenced: int) -> dict[str, Any]:
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
    state, (states, reasons, _) = run_state(connection), kept_counts(connection)
    return {
        "step": state.steps_delivered,
        "rollouts": balance(state.rollouts_planned, states, reasons, state.fenced),
        "states": {state.value: states[state] for state in RolloutState if states[state]},
        "deaths": dead_jobs(connection, limit=DEATHS_SHOWN),
    }


def run_state(connection: sqlite3.Connection, *kinds: str) -> RunState:
    """The counters and positions of the run, and the rows of `kinds`: attributes of `RunState`."""
    query = f"SELECT * FROM state WHERE kind IN ('run', {', '.join('?' * len(kinds)) or 'NULL'}) ORDER BY rowid"
    return RunState.of_rows(connection.execute(query, kinds))


def whole_state(connection: sqlite3.Connection) -> RunState:
    return RunState.of_rows(connection.execute("SELECT * FROM state ORDER BY rowid"))


class Counted(NamedTuple):
    """Rollouts of training by state, the filtered ones by reason, and those of evaluations: all, and ended ones."""

    states: Counter[RolloutState]
    reasons: Counter[str]
    evaluation: Counter[str]


def kept_counts(connection: sqlite3.Connection) -> Counted:
    """As the ledger counts them; `counted` looks at the rows."""
    counts = run_state(connection, "rollout_counts").rollout_counts
    states = Counter({RolloutState(name): number for name, number in counts["states"].by_name.items()})
    return Counted(states, counts["reasons"].by_name, counts["evaluation"].by_name)


def counted(connection: sqlite3.Connection) -> Counted:
    """The same from every row: seconds for millions of them."""
    by_state, by_reason, of_evaluations = Counter[RolloutState](), Counter[str](), Counter[str]()
    trained_in = trained_steps(connection)
    names = dict(connection.execute("SELECT id, name FROM names").fetchall())
    query = """
        SELECT purpose = 'evaluation', rollouts.state, step, reason, count(*) FROM rollouts LEFT JOIN groups ON grp = id
        GROUP BY 1, 2, 3, 4"""
    rows = connection.execute(query).fetchall()
    query = "SELECT state = ?, state, NULL, reason, count(*) FROM closed_rollouts GROUP BY state, reason"
    for is_evaluation, code, step, reason, number in [*rows, *connection.execute(query, (archive.EVALUATED,))]:
        state = archive.STATES.get(code) or RolloutState(code)
        reason = names.get(reason, f"unknown reason {reason}") if isinstance(reason, int) else reason
        if is_evaluation:
            of_evaluations["planned"] += number
            of_evaluations[reason or RolloutState.EVALUATED] += number if state is RolloutState.EVALUATED else 0
        else:
            is_trained = state is RolloutState.DELIVERED and step in trained_in
            by_state[RolloutState.TRAINED if is_trained else state] += number
            by_reason[reason or ""] += number if reason else 0
    query = f"""
        SELECT count(*) FROM batches CROSS JOIN closed_groups USING (step) CROSS JOIN closed_rollouts ON grp = ordinal
        WHERE batches.state = 'trained' AND closed_rollouts.state = {archive.DELIVERED}"""
    trained = connection.execute(query).fetchone()[0]
    by_state += Counter({RolloutState.TRAINED: trained})
    by_state[RolloutState.DELIVERED] -= trained
    return Counted(by_state, +by_reason, +of_evaluations)


def trained_steps(connection: sqlite3.Connection) -> set[int]:
    query = "SELECT step FROM batches WHERE state = ?"
    return {step for (step,) in connection.execute(query, (BatchState.TRAINED,))}


def untrained_steps(connection: sqlite3.Connection) -> dict[int, int]:
    """Delivered step -> the number of its rollouts, for steps that the trainer has not acknowledged."""
    query = "SELECT step, rollouts FROM batches WHERE state = ? ORDER BY step"
    return dict(connection.execute(query, (BatchState.DELIVERED,)).fetchall())


def released_steps(connection: sqlite3.Connection) -> dict[str, int]:
    """Kind of `RELEASED` -> the first step whose files of that kind are still there."""
    return run_state(connection).released


def dead_jobs(connection: sqlite3.Connection, *, limit: int) -> list[dict[str, Any]]:
    """Why jobs died, the most frequent cause first."""
    dead = run_state(connection, "dead_jobs").dead_jobs
    deaths = Counter({(kind, error): jobs for kind, row in dead.items() for error, jobs in row.by_name.items()})
    return [{"kind": kind, "error": error or None, "jobs": jobs} for (kind, error), jobs in deaths.most_common(limit)]


# checks: what audit compares


def structure_problems(connection: sqlite3.Connection, *, limit: int, archive: bool = True) -> Iterator[str]:
    """At most `limit` problems of each kind."""
    for problem, query in (STRUCTURE_CHECKS | (ARCHIVE_CHECKS if archive else {})).items():
        for (subject,) in connection.execute(f"{query} LIMIT {limit}"):
            yield problem.format(subject)


def delivered_rollouts(connection: sqlite3.Connection, *, from_step: int = 0) -> Iterator[tuple[int, str]]:
    """(step, rollout) of every delivered rollout, trained ones included, in the order of steps."""
    archived = connection.execute(
        f"""SELECT step, {archive.ROLLOUT} FROM closed_groups INDEXED BY closed_steps
        CROSS JOIN closed_rollouts ON grp = ordinal
        WHERE step IS NOT NULL AND step >= ? AND closed_rollouts.state = {archive.DELIVERED} ORDER BY step""",
        (from_step,),
    )
    hot = f"SELECT step, {ROLLOUT} FROM rollouts WHERE {DELIVERED} AND step >= ? ORDER BY step"
    return merge(archived, connection.execute(hot, (from_step,)), key=lambda row: row[0])


def step_of(connection: sqlite3.Connection, rollout: str) -> int | None:
    """The step that a rollout was delivered in."""
    group, index = RolloutId.parse(rollout)
    query = f"""
        SELECT step FROM rollouts WHERE grp = :group AND idx = :index AND {DELIVERED}
        UNION ALL SELECT step FROM closed_rollouts JOIN closed_groups ON ordinal = grp
        WHERE grp = :ordinal AND idx = :index AND closed_rollouts.state = {archive.DELIVERED}"""
    values = {"group": group, "index": index, "ordinal": _ordinal(group)}
    row = connection.execute(query, values).fetchone()
    return row[0] if row else None


def _ordinal(group: str) -> int | None:
    """None for what is not the id of a group: a directory in the store may have any name."""
    try:
        return GroupId.parse(group).ordinal
    except MalformedId:
        return None


def delivered_steps(connection: sqlite3.Connection) -> set[int]:
    """Trained ones included."""
    query = "SELECT step FROM batches WHERE state != ?"
    return {step for (step,) in connection.execute(query, (BatchState.COMPOSED,))}


class DeliveredFiles(NamedTuple):
    """Keys are None of files that the rollout does not have."""

    rollout: str
    step: int
    columns: str | None
    experts: str | None


def delivered_files(connection: sqlite3.Connection, run: str, groups: Collection[str]) -> Iterator[DeliveredFiles]:
    """The files of the delivered rollouts of `groups`. One statement: a group may be archived at any moment."""
    query = f"""
        SELECT {ROLLOUT}, step, json_extract(result, '$.columns.key'), json_extract(result, '$.experts.key'), NULL, NULL
        FROM rollouts WHERE {DELIVERED} AND grp IN (SELECT value FROM json_each(:groups))
        UNION ALL SELECT {archive.ROLLOUT}, step, columns, experts, attempt, execution
        FROM closed_rollouts JOIN closed_groups ON ordinal = grp
        WHERE closed_rollouts.state = {archive.DELIVERED} AND grp IN (SELECT value FROM json_each(:ordinals))"""
    ordinals = [ordinal for group in groups if (ordinal := _ordinal(group)) is not None]
    values = {"groups": orjson.dumps(list(groups)).decode(), "ordinals": orjson.dumps(ordinals).decode()}
    for rollout, step, columns, experts, attempt, execution in connection.execute(query, values):
        keys = [
            archive.file_key(run, rollout, attempt, execution, file, name)
            for file, name in ((columns, COLUMNS_FILE), (experts, EXPERTS_FILE))
        ]
        yield DeliveredFiles(rollout, step, *keys)


# open records: what a resumed orchestrator reads


def has_tables(connection: sqlite3.Connection) -> bool:
    """False where the first start was killed before it had created them."""
    return bool(connection.execute("PRAGMA user_version").fetchone()[0])


def open_groups(connection: sqlite3.Connection) -> list[Row]:
    """All columns, in the order of planning."""
    return connection.execute("SELECT * FROM groups WHERE state != 'closed' ORDER BY ordinal").fetchall()


def rollouts_of_open_groups(connection: sqlite3.Connection) -> Iterator[Row]:
    """All columns, by group and index."""
    return connection.execute(
        "SELECT rollouts.* FROM rollouts JOIN groups ON grp = id WHERE groups.state != 'closed' ORDER BY grp, idx"
    )


def open_batches(connection: sqlite3.Connection) -> list[Row]:
    """(step, formation, advantages, estimator state, credit) of the steps that are composed and not delivered."""
    query = "SELECT step, formation, advantages, estimator_state, credit FROM batches WHERE state = ? ORDER BY step"
    return connection.execute(query, (BatchState.COMPOSED,)).fetchall()


def open_jobs(connection: sqlite3.Connection, kept: Collection[str] = ()) -> Iterator[Row]:
    """All columns of the jobs that wait or are submitted, and of settled or dead ones of the stages `kept`."""
    return connection.execute(
        f"SELECT * FROM jobs WHERE state IN ('waiting', 'submitted') OR kind IN ({', '.join('?' * len(kept))}) "
        "AND state IN (?, ?) ORDER BY sequence",
        (*kept, JobState.SETTLED, JobState.DEAD),
    )
