"""What the ledger keeps of one rollout, one group and one step: read-only, in the hot tables and in the archive.

Histories of closed groups are kept for `trainer.keep_events_steps`; after that a rollout has its row in the archive.
"""

import sqlite3
from collections.abc import Collection
from typing import Any, NamedTuple

import orjson

from headpond.ids import GroupId, RolloutId
from headpond.ledger import pages

EVENTS_SHOWN = 50
GROUP_EVENTS_SHOWN = 200
DEAD_SHOWN = 1_000
LOST_POLICY_ERROR = "it failed; its error is not kept any more (trainer.keep_events_steps)"
JOB = ("id", "kind", "state", "attempt", "failures", "losses", "error")
SHOWN = ("state", "reason", "step", "advantage", "attempt", "execution", "generated_at", "duration_s", "environment",
         "example", "group_state", "failures", "losses")  # fmt: skip
OF_RESULT = ("reward", "turns", "prompt_tokens", "tool_tokens", "completion_tokens", "version_first", "version_last",
             "truncated")  # fmt: skip
EVENT = ("at", "step", "subject", "action", "detail")

Row = dict[str, Any]


def events_of(
    connection: sqlite3.Connection, subjects: Collection[str], limit: int = EVENTS_SHOWN
) -> list[dict[str, Any]]:
    """The last events of jobs, groups or steps, the oldest first."""
    rows = connection.execute(
        "SELECT at, step, subject, action, detail FROM events WHERE subject IN (SELECT value FROM json_each(?)) "
        "ORDER BY id DESC LIMIT ?",
        (orjson.dumps(list(subjects)).decode(), limit),
    ).fetchall()
    return [dict(zip(EVENT, row, strict=True)) for row in reversed(rows)]


class Kept(NamedTuple):
    """What the ledger keeps of a group beside its rows: of old groups nothing (`trainer.keep_events_steps`)."""

    results: dict[int, Row]  # index -> `RolloutResult` as JSON, for rollouts that have one
    errors: dict[int, str]
    jobs: list[Row]


def kept_of_group(connection: sqlite3.Connection, group: str) -> Kept:
    row = connection.execute("SELECT content FROM histories WHERE grp = ?", (GroupId.parse(group).ordinal,)).fetchone()
    if row:
        content = orjson.loads(row[0])
        results = {each["index"]: each["result"] for each in content["rollouts"] if each.get("result")}
        errors = {each["index"]: each["error"] for each in content["rollouts"] if each.get("error")}
        return Kept(results, errors, content["jobs"])
    rows = connection.execute("SELECT idx, result, error FROM rollouts WHERE grp = ?", (group,)).fetchall()
    jobs = connection.execute(
        f"SELECT {', '.join(JOB)} FROM jobs WHERE id > ? AND id < ? ORDER BY id", (f"{group}-", f"{group}.")
    )
    return Kept(
        {index: orjson.loads(result) for index, result, _ in rows if result},
        {index: error for index, _, error in rows if error},
        [dict(zip(JOB, values, strict=True)) for values in jobs],
    )


def group_events(connection: sqlite3.Connection, group: str) -> list[Row]:
    """Of the group and its jobs, in order. `+id`: found by their subject, not by reading all 100,000 events."""
    query = f"""SELECT {", ".join(EVENT)} FROM events
        WHERE subject >= :group AND subject < :group || '.' ORDER BY +id DESC LIMIT :limit"""
    rows = connection.execute(query, {"group": group, "limit": GROUP_EVENTS_SHOWN}).fetchall()
    return [dict(zip(EVENT, row, strict=True)) for row in reversed(rows)]


def rollout(connection: sqlite3.Connection, id: str) -> dict[str, Any] | None:
    """State, attempts, jobs, events and result of a rollout; None if the ledger has no such rollout. Call in a
    `snapshot`: its group may be archived at any moment."""
    group, index = RolloutId.parse(id)
    row = next((row for row in pages.group_rows(connection, group) if row["index"] == index), None)
    if row is None:
        return None
    kept = kept_of_group(connection, group)
    jobs = [{"job": job["id"], **{name: job[name] for name in JOB[1:]}} for job in kept.jobs]
    own = next((job for job in jobs if job["job"] == id), None)
    stages = [job for job in jobs if not RolloutId.match(job["job"])]
    shown = [id, group, *(job["job"] for job in stages)]
    return {
        "rollout": id,
        "group": group,
        **{name: row[name] for name in SHOWN},
        "error": kept.errors.get(index),
        "result": kept.results.get(index) or _archived_result(row),
        "job": own,
        "stages": stages,
        "events": events_of(connection, shown),
    }


def _archived_result(row: Row) -> dict[str, Any] | None:
    """What the archive has of a result whose history is not kept any more."""
    if row["reward"] is None and not row["policy_failed"]:
        return None
    error = LOST_POLICY_ERROR if row["policy_failed"] else None
    return {name: row[name] for name in OF_RESULT} | {"policy_error": error}


def step(connection: sqlite3.Connection, number: int) -> dict[str, Any] | None:
    """State, rollouts and events of a step; None if it was not composed yet."""
    row = connection.execute("SELECT state, formation, rollouts FROM batches WHERE step = ?", (number,)).fetchone()
    if row is None:
        return None
    state, formation, delivered = row
    rewards = connection.execute("SELECT count(*), avg(reward) FROM all_rollouts WHERE step = ?", (number,)).fetchone()
    return {
        "step": number, "state": state, "formation": formation, "rollouts": delivered or rewards[0],
        "reward_mean": rewards[1], "events": events_of(connection, [f"step {number}"]),
    }  # fmt: skip


def dead_rollouts(connection: sqlite3.Connection, *, limit: int = DEAD_SHOWN) -> list[dict[str, Any]]:
    """The dead rollouts whose history is kept, the newest first: environment, example, error, attempts."""
    kept = connection.execute(
        "SELECT printf('g%07d-%d', grp, json_extract(value, '$.index')), names.name, example, "
        "json_extract(value, '$.error') FROM histories JOIN closed_groups ON ordinal = grp "
        "JOIN names ON names.id = environment, json_each(content, '$.rollouts') "
        "WHERE json_extract(value, '$.state') = 'dead' ORDER BY histories.id DESC LIMIT ?",
        (limit,),
    ).fetchall()
    hot = connection.execute(
        "SELECT grp || '-' || idx, environment, example, error FROM rollouts JOIN groups ON grp = id "
        "WHERE rollouts.state = 'dead' ORDER BY grp DESC LIMIT ?",
        (limit,),
    ).fetchall()
    names = ("rollout", "environment", "example", "error")
    return [dict(zip(names, row, strict=True)) for row in [*hot, *kept][:limit]]
