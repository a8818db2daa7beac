"""Rollouts as rows: in pages by key, newest first, and those of one group.

A page reads a bounded number of rows. Where few of them match, it holds fewer than were asked for and names the key at
which the next one begins.
"""

import sqlite3
from dataclasses import dataclass
from typing import Any, NamedTuple

from headpond.ids import GroupId, RolloutId
from headpond.ledger import archive
from headpond.ledger.states import RolloutState

# Archived rows that one page reads: 10 to 20 ms. An index by reason would be written with every
# rollout.
SCANNED_MOST = 20_000

FIELDS = ("grp", "idx", "state", "reason", "step", "environment", "example", "reward", "advantage", "turns",
          "prompt_tokens", "tool_tokens", "completion_tokens", "samples", "version_first", "version_last", "masked",
          "truncated", "policy_failed", "failures", "losses", "generated_at", "duration_s", "attempt", "execution",
          "group_state")  # fmt: skip
_ARCHIVED = f"""
SELECT closed_rollouts.grp, idx, {archive.STATE},
    (SELECT name FROM names WHERE id = closed_rollouts.reason),
    iif(closed_rollouts.state = {archive.DELIVERED}, closed_groups.step, NULL),
    (SELECT name FROM names WHERE id = environment), example, reward, advantage, turns, prompt_tokens, tool_tokens,
    completion_tokens, samples, version_first, version_last, masked, truncated, policy_failed, failures, losses,
    generated_ms / 1000.0, duration_ms / 1000.0, attempt, execution, 'closed'
FROM {{tables}} LEFT JOIN batches USING (step)
"""
_BY_KEY = "closed_rollouts CROSS JOIN closed_groups ON ordinal = closed_rollouts.grp"
_BY_STEP = "closed_groups INDEXED BY closed_steps CROSS JOIN closed_rollouts ON ordinal = closed_rollouts.grp"
_HOT = """
SELECT ordinal, idx, iif(rollouts.state = 'delivered' AND batches.state = 'trained', 'trained', rollouts.state),
    reason, rollouts.step, environment, example, json_extract(rollouts.result, '$.reward'), advantage,
    json_extract(rollouts.result, '$.turns'), json_extract(rollouts.result, '$.prompt_tokens'),
    json_extract(rollouts.result, '$.tool_tokens'), json_extract(rollouts.result, '$.completion_tokens'),
    json_array_length(rollouts.result, '$.sample_lengths'), json_extract(rollouts.result, '$.version_first'),
    json_extract(rollouts.result, '$.version_last'), masked, json_extract(rollouts.result, '$.truncated'),
    json_extract(rollouts.result, '$.policy_error') IS NOT NULL, coalesce(failures, 0), coalesce(losses, 0),
    generated_at, duration_s, rollouts.attempt, execution, groups.state
FROM groups JOIN rollouts ON grp = groups.id LEFT JOIN batches USING (step)
LEFT JOIN jobs ON jobs.id = grp || '-' || idx
"""

Row = dict[str, Any]


class Key(NamedTuple):
    """Where a page begins: it holds rollouts before this one."""

    ordinal: int
    number: int  # of the rollout in its group

    def __str__(self) -> str:
        return str(RolloutId(str(GroupId(self.ordinal)), self.number))

    @classmethod
    def parse(cls, text: str) -> "Key":
        """MalformedId for a text that is not the id of a rollout."""
        group, number = RolloutId.parse(text)
        return cls(GroupId.parse(group).ordinal, number)


@dataclass(frozen=True, kw_only=True)
class Filter:
    state: RolloutState | None = None
    reason: str | None = None
    step: int | None = None
    environment: str | None = None
    lost_before_generation: bool = False  # only rollouts that ended without a result

    @property
    def is_empty(self) -> bool:
        return self == Filter()


@dataclass(frozen=True, kw_only=True)
class Page:
    rows: list[Row]
    next: Key | None  # None after the last page


def rollouts_page(
    connection: sqlite3.Connection, wanted: Filter, *, before: Key | None = None, limit: int = 50
) -> Page:
    """At most `limit` rollouts before the key, the newest first. Call in a `snapshot`."""
    start = before or Key(1 << 62, 0)
    end = None if wanted.is_empty or wanted.step is not None else _scan_end(connection, start)
    conditions, values = _conditions(connection, wanted)
    bounds: dict[str, Any] = {"grp": start.ordinal, "idx": start.number, "limit": limit, **values}
    if end:
        bounds |= {"end_grp": end.ordinal, "end_idx": end.number}
    above = " AND ({grp}, idx) >= (:end_grp, :end_idx)" if end else ""
    tables = _BY_KEY if wanted.step is None else _BY_STEP
    query = _query(_ARCHIVED.format(tables=tables), "closed_rollouts.grp", above, conditions[0])
    rows = connection.execute(query, bounds).fetchall()
    rows += connection.execute(_query(_HOT, "ordinal", above, conditions[1]), bounds).fetchall()
    found = sorted(map(_row, rows), key=lambda row: (row["grp"], row["idx"]), reverse=True)[:limit]
    last = Key(found[-1]["grp"], found[-1]["idx"]) if len(found) == limit else end
    return Page(rows=[_shown(row) for row in found], next=last)


def _query(select: str, grp: str, above: str, condition: str) -> str:
    bounded = f"({grp}, idx) < (:grp, :idx){above.format(grp=grp)}"
    return f"{select} WHERE {bounded}{condition} ORDER BY {grp} DESC, idx DESC LIMIT :limit"


def _scan_end(connection: sqlite3.Connection, start: Key) -> Key | None:
    """The key that SCANNED_MOST archived rows lie before."""
    query = (
        "SELECT grp, idx FROM closed_rollouts WHERE (grp, idx) < (?, ?) ORDER BY grp DESC, idx DESC LIMIT 1 OFFSET ?"
    )
    row = connection.execute(query, (*start, SCANNED_MOST)).fetchone()
    return Key(*row) if row else None


def _conditions(connection: sqlite3.Connection, wanted: Filter) -> tuple[tuple[str, str], dict[str, Any]]:
    """SQL for the archive and for the hot tables, and its values."""
    archived, hot, values = list[str](), list[str](), dict[str, Any]()
    if wanted.state is not None:
        delivered = wanted.state in (RolloutState.DELIVERED, RolloutState.TRAINED)
        values["state"] = wanted.state.value
        values["code"] = archive.CODES.get(RolloutState.DELIVERED if delivered else wanted.state, wanted.state.value)
        trained = f" AND coalesce(batches.state, '') {'=' if wanted.state == 'trained' else '!='} 'trained'"
        archived.append("closed_rollouts.state = :code" + (trained if delivered else ""))
        hot.append("rollouts.state IN ('delivered', 'trained')" + trained if delivered else "rollouts.state = :state")
    if wanted.reason is not None:
        values["reason"], values["reason_id"] = wanted.reason, _name_id(connection, wanted.reason)
        archived.append("closed_rollouts.reason = :reason_id")
        hot.append("rollouts.reason = :reason")
    if wanted.step is not None:
        values["step"] = wanted.step
        archived.append(f"step = :step AND closed_rollouts.state = {archive.DELIVERED}")
        hot.append("rollouts.step = :step")
    if wanted.environment is not None:
        values["environment"], values["environment_id"] = wanted.environment, _name_id(connection, wanted.environment)
        archived.append("environment = :environment_id")
        hot.append("environment = :environment")
    if wanted.lost_before_generation:
        archived.append("generated_ms IS NULL")
        hot.append("generated_at IS NULL")
    return tuple("".join(f" AND {one}" for one in some) for some in (archived, hot)), values  # pyright: ignore[reportReturnType]


def _name_id(connection: sqlite3.Connection, name: str) -> int:
    row = connection.execute("SELECT id FROM names WHERE name = ?", (name,)).fetchone()
    return row[0] if row else -1


def _row(values: tuple[Any, ...]) -> Row:
    return dict(zip(FIELDS, values, strict=True))


def _shown(row: Row) -> Row:
    group = str(GroupId(row.pop("grp")))
    index, execution = row.pop("idx"), row.pop("execution")
    flags = {name: bool(row[name]) for name in ("masked", "truncated", "policy_failed")}
    shown = {"execution": archive.execution_text(execution) if execution is not None else None}
    return {"id": str(RolloutId(group, index)), "group": group, "index": index, **row, **flags, **shown}


def group_rows(connection: sqlite3.Connection, group: str) -> list[Row]:
    """The rollouts of a group, by index; empty if there is no such group."""
    ordinal = GroupId.parse(group).ordinal
    archived = connection.execute(_ARCHIVED.format(tables=_BY_KEY) + " WHERE closed_rollouts.grp = ?", (ordinal,))
    rows = archived.fetchall() or connection.execute(_HOT + " WHERE groups.id = ?", (group,)).fetchall()
    return [_shown(row) for row in sorted(map(_row, rows), key=lambda row: row["idx"])]
