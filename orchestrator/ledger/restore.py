"""Reads the open records back from SQLite: the first thing an orchestrator does when it resumes a run."""

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from headpond.ids import EncodeJobId
from headpond.ledger import queries, schema
from headpond.ledger.archive import execution_text
from headpond.ledger.state_rows import RunState
from headpond.ledger.states import GroupState, JobState, Purpose, RolloutState
from headpond.orchestrator.ledger.rows import (
    BatchRecord,
    GroupRecord,
    JobRecord,
    RolloutRecord,
)
from headpond.records.rollout import RolloutResult
from headpond.tasks.stage import Subject, all_stages


@dataclass(kw_only=True)
class Records:
    """What a ledger has in memory."""

    # open groups, in the order of planning
    groups: dict[str, GroupRecord] = field(default_factory=dict[str, GroupRecord])
    # jobs that are neither settled nor dead, and the jobs of open batches
    jobs: dict[str, JobRecord] = field(default_factory=dict[str, JobRecord])
    # batches that are not delivered
    batches: dict[int, BatchRecord] = field(default_factory=dict[int, BatchRecord])
    state: RunState = field(default_factory=RunState)  # counters and positions
    # delivered step -> its rollouts
    untrained: dict[int, int] = field(default_factory=dict[int, int])


def read(path: Path) -> Records:
    """Empty if there is no ledger yet."""
    if not path.exists():
        return Records()
    with schema.reading(path) as connection:
        if not queries.has_tables(connection):
            return Records()
        groups = _groups(connection)
        batches = _batches(connection, groups)
        return Records(
            groups=groups,
            jobs=_jobs(connection, batches),
            batches=batches,
            state=queries.whole_state(connection),
            untrained=queries.untrained_steps(connection),
        )


def _groups(connection: sqlite3.Connection) -> dict[str, GroupRecord]:
    groups = {
        id: GroupRecord(
            id=id, ordinal=ordinal, environment=environment, example=example, state=state, purpose=Purpose(purpose)
        )
        for id, ordinal, environment, example, state, purpose in queries.open_groups(connection)
    }
    for row in queries.rollouts_of_open_groups(connection):
        group, index, state, reason, step, advantage, result, masked, error, attempt, execution, at, duration_s = row
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
                attempt=attempt,
                execution=execution_text(execution) if execution is not None else None,
                generated_at=at,
                duration_s=duration_s,
            )
        )
    return groups


def _batches(connection: sqlite3.Connection, groups: dict[str, GroupRecord]) -> dict[int, BatchRecord]:
    batches = {
        step: BatchRecord(
            step=step,
            formation=formation,
            advantages=orjson.loads(advantages or "{}"),
            estimator_state=estimator_state,
            credit=credit,
        )
        for step, formation, advantages, estimator_state, credit in queries.open_batches(connection)
    }
    for group in groups.values():
        if group.state == GroupState.BATCHED:
            step = group.of(RolloutState.BATCHED)[0].step
            assert step is not None
            batches[step].groups.append(group)
    return {step: batch for step, batch in batches.items() if batch.groups}


def _jobs(connection: sqlite3.Connection, batches: dict[int, BatchRecord]) -> dict[str, JobRecord]:
    jobs: dict[str, JobRecord] = {}
    of_steps = [name for name, stage in all_stages().items() if stage.subject is Subject.STEP]
    for row in queries.open_jobs(connection, of_steps):
        id, stage, subject, attempt, sequence, state, failures, losses, error, result = row
        job = JobRecord(
            id=id, stage=stage, subject=subject, attempt=attempt, sequence=sequence, state=JobState(state),
            failures=failures, losses=losses, error=error,
            result=all_stages()[stage].result.model_validate_json(result) if result else None,
        )  # fmt: skip
        if job.subject_kind is not Subject.STEP or _is_current(id, batches.get(int(subject))):
            jobs[id] = job
    return jobs


def _is_current(job: str, batch: BatchRecord | None) -> bool:
    """Whether the job of a step belongs to its newest formation, and a batch phase is not done."""
    if batch is None:
        return False
    match = EncodeJobId.match(job)
    return match.formation == batch.formation if match else job == batch.batch_phase_id and not batch.advantages
