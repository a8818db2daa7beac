"""Reads back from SQLite what is open: the first thing an orchestrator does when it resumes a run."""

import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from orchestrator.ledger.records import BatchRecord, GroupRecord, JobRecord, RolloutRecord, Value
from penstock.ledger import schema
from penstock.ledger.states import BatchState, GroupState, JobKind, JobState, RolloutState
from penstock.messages import EncodeResult, RolloutResult


@dataclass(kw_only=True)
class Kept:
    groups: dict[str, GroupRecord] = field(default_factory=dict[str, GroupRecord])
    jobs: dict[str, JobRecord] = field(default_factory=dict[str, JobRecord])
    batches: dict[int, BatchRecord] = field(default_factory=dict[int, BatchRecord])
    meta: dict[str, Value] = field(default_factory=dict[str, Value])
    states: Counter[RolloutState] = field(default_factory=Counter[RolloutState])
    reasons: Counter[str] = field(default_factory=Counter[str])
    untrained: dict[int, int] = field(default_factory=dict[int, int])
    """delivered step -> its rollouts"""


def read(path: Path) -> Kept:
    if not path.exists():
        return Kept()
    with schema.reading(path) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'open_jobs'").fetchone():
            return Kept()  # the first start died before its tables were there
        groups = _groups(connection)
        batches = _batches(connection, groups)
        return Kept(
            groups=groups,
            jobs=_jobs(connection, batches),
            batches=batches,
            meta=dict(connection.execute("SELECT key, value FROM meta").fetchall()),
            states=Counter({RolloutState(state): count for state, count in count_by(connection, "state")}),
            reasons=Counter(dict(count_by(connection, "reason"))),
            untrained=dict(
                connection.execute(
                    "SELECT step, count(*) FROM rollouts WHERE state = 'delivered' GROUP BY step"
                ).fetchall()
            ),
        )


def count_by(connection: sqlite3.Connection, column: Literal["state", "reason", "error"]) -> list[tuple[str, int]]:
    """How many rollouts have each value of `column`, less those that have none."""
    return connection.execute(
        f"SELECT {column}, count(*) FROM rollouts WHERE {column} IS NOT NULL GROUP BY {column}"  # noqa: S608  one of ours
    ).fetchall()


def _groups(connection: sqlite3.Connection) -> dict[str, GroupRecord]:
    groups = {
        id: GroupRecord(id=id, ordinal=ordinal, environment=environment, example=example, state=GroupState(state))
        for id, ordinal, environment, example, state in connection.execute(
            "SELECT id, ordinal, environment, example, state FROM groups WHERE state != 'closed' ORDER BY ordinal"
        )
    }
    rows = connection.execute(
        "SELECT rollouts.* FROM rollouts JOIN groups ON grp = id WHERE groups.state != 'closed' ORDER BY grp, idx"
    )
    for group, index, state, reason, step, advantage, result, masked, error in rows:
        groups[group].rollouts.append(
            RolloutRecord(
                group=group,
                index=index,
                state=RolloutState(state),
                reason=reason,
                step=step,
                advantage=advantage,
                result=RolloutResult.model_validate_json(result) if result else None,
                masked=bool(masked),
                error=error,
            )
        )
    return groups


def _batches(connection: sqlite3.Connection, groups: dict[str, GroupRecord]) -> dict[int, BatchRecord]:
    batches = {
        step: BatchRecord(step=step, formation=formation)
        for step, formation in connection.execute(
            "SELECT step, formation FROM batches WHERE state = ? ORDER BY step", (BatchState.COMPOSED,)
        )
    }
    for group in groups.values():
        if group.state is GroupState.BATCHED:
            step = group.of(RolloutState.BATCHED)[0].step
            assert step is not None
            batches[step].groups.append(group)
    return {step: batch for step, batch in batches.items() if batch.groups}


def _jobs(connection: sqlite3.Connection, batches: dict[int, BatchRecord]) -> dict[str, JobRecord]:
    rows = connection.execute(
        "SELECT * FROM jobs WHERE state IN ('waiting', 'submitted') OR kind = ? AND state = ? ORDER BY sequence",
        (JobKind.ENCODE, JobState.SETTLED),
    )
    jobs: dict[str, JobRecord] = {}
    for id, kind, subject, attempt, sequence, state, failures, losses, error, result in rows:
        if kind == JobKind.ENCODE and not _is_current(id, int(subject), batches):
            continue
        jobs[id] = JobRecord(
            id=id, kind=JobKind(kind), subject=subject, attempt=attempt, sequence=sequence, state=JobState(state),
            failures=failures, losses=losses, error=error,
            result=EncodeResult.model_validate_json(result) if result else None,
        )  # fmt: skip
    return jobs


def _is_current(job: str, step: int, batches: dict[int, BatchRecord]) -> bool:
    batch = batches.get(step)
    return batch is not None and job.startswith(f"s{batch.step:06d}f{batch.formation}r")
