"""Does it add up: the ledger against itself, against the manifests, and these against the bytes on the disk.

Only reads; the run may go on.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator import run_dir
from orchestrator.ledger import restore
from orchestrator.reporting.reporter import counts
from penstock.batches import Manifest, read_manifests
from penstock.errors import BlobError
from penstock.ledger import schema
from penstock.ledger.states import BatchState, RolloutState
from penstock.store import BlobRef, Store

Progress = Callable[[int, int], None]
"""Is told the bytes read so far, and all that there are to read."""


@dataclass(frozen=True, kw_only=True)
class SealedFile:
    step: int
    ref: BlobRef
    released: str
    """the ledger's counter of steps that have let go of such files"""


def files_of(manifest: Manifest) -> Iterator[SealedFile]:
    step = manifest.plan.step
    for rank in manifest.ranks:
        yield SealedFile(step=step, ref=rank.file, released="columns_released")
        if rank.rollouts_jsonl:
            yield SealedFile(step=step, ref=rank.rollouts_jsonl, released="")
    for rollout in manifest.plan.rollouts:
        yield SealedFile(step=step, ref=rollout.columns, released="columns_released")
        if rollout.experts:
            yield SealedFile(step=step, ref=rollout.experts, released="experts_released")


def damaged(
    store: Store, manifests: dict[int, Manifest], connection: sqlite3.Connection, progress: Progress
) -> Iterator[str]:
    """What is wrong with them. The run may go on meanwhile, and let go of some."""
    released = _released(connection)
    files = [each for manifest in manifests.values() for each in files_of(manifest) if each.ref.size]
    files = [each for each in files if each.step >= released.get(each.released, 0)]
    done, total = 0, sum(each.ref.size for each in files)
    for each in files:
        try:
            store.open(each.ref)
        except BlobError as error:
            if each.step >= _released(connection).get(each.released, 0):
                yield f"step {each.step}: {error}"
        done += each.ref.size
        progress(done, total)


def _released(connection: sqlite3.Connection) -> dict[str, int]:
    rows = connection.execute("SELECT key, value FROM meta WHERE key IN ('columns_released', 'experts_released')")
    return dict(rows.fetchall())


SHOWN_MOST = 20  # of any one kind of problem
NAME = "rollouts.grp || '-' || rollouts.idx"
CHECKS = {
    "rollout {} belongs to no group": f"""
        SELECT {NAME} FROM rollouts LEFT JOIN groups ON grp = id WHERE id IS NULL""",
    "rollout {} is open in a closed group": f"""
        SELECT {NAME} FROM rollouts JOIN groups ON grp = id WHERE groups.state = 'closed'
        AND rollouts.state NOT IN ('filtered', 'delivered', 'trained', 'dead')""",
    "rollout {} is open and has no job": f"""
        SELECT {NAME} FROM rollouts LEFT JOIN jobs ON jobs.id = {NAME}
        WHERE rollouts.state IN ('planned', 'submitted', 'running')
        AND coalesce(jobs.state, '') NOT IN ('waiting', 'submitted')""",
    "group {} is in a stage and has no job": """
        SELECT groups.id FROM groups LEFT JOIN jobs ON subject = groups.id
        AND kind IN ('score', 'filter', 'advantage') AND jobs.state IN ('waiting', 'submitted')
        WHERE groups.state IN ('scoring', 'filtering', 'estimating') AND jobs.id IS NULL""",
    "rollout {} is batched for a step that is not open": f"""
        SELECT {NAME} FROM rollouts LEFT JOIN batches USING (step)
        WHERE rollouts.state = 'batched' AND coalesce(batches.state, '') != 'composed'""",
    "rollout {} has a step and is in no batch": f"""
        SELECT {NAME} FROM rollouts WHERE step IS NOT NULL AND state NOT IN ('batched', 'delivered', 'trained')""",
}


def audit(directory: Path, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """`balanced` is true when the counts add up and no problem was found."""
    store = Store(run_dir.store_path(directory))
    with schema.reading(run_dir.ledger_path(directory)) as connection:
        connection.execute("BEGIN")  # one moment of the ledger for all questions; the manifests are read after it
        found = counted(connection)["rollouts"]
        manifests = read_manifests(store)
        problems = [*_structure(connection), *_deliveries(connection, manifests)]
        dead_jobs = _dead_jobs(connection)
        connection.execute("COMMIT")  # from here on each question sees the ledger of its own time
        problems += islice(damaged(store, manifests, connection, progress), SHOWN_MOST)
    return {
        **found,
        "balanced": found["balanced"] and not problems,
        "problems": problems,
        "steps": len(manifests),
        "dead_jobs": dead_jobs,
    }


def counted(connection: sqlite3.Connection) -> dict[str, Any]:
    """The ledger's part of a run's status."""
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    states = Counter({RolloutState(state): count for state, count in restore.count_by(connection, "state")})
    reasons = Counter(dict(restore.count_by(connection, "reason")))
    return {
        "step": meta.get("steps_delivered", 0),
        "rollouts": counts(meta.get("rollouts_planned", 0), states, reasons, meta.get("fenced", 0)),
        "states": {state.value: states[state] for state in RolloutState if states[state]},
    }


def _dead_jobs(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Why jobs died, the most frequent cause first."""
    rows = connection.execute(
        "SELECT kind, error, count(*) FROM jobs WHERE state = 'dead' GROUP BY kind, error ORDER BY 3 DESC LIMIT ?",
        (SHOWN_MOST,),
    )
    return [{"kind": kind, "error": error, "jobs": jobs} for kind, error, jobs in rows]


def _structure(connection: sqlite3.Connection) -> Iterator[str]:
    """Every rollout belongs to a group; every open one has something that will move it."""
    for text, query in CHECKS.items():
        for (subject,) in connection.execute(f"{query} LIMIT {SHOWN_MOST}"):
            yield text.format(subject)


def _deliveries(connection: sqlite3.Connection, manifests: dict[int, Manifest]) -> Iterator[str]:
    """The manifests are the truth: each rollout in one of them at most, and the ledger knows it."""
    step_of: dict[str, int] = {}
    for step, manifest in manifests.items():
        for rollout in (planned.rollout for planned in manifest.plan.rollouts):
            if rollout in step_of:
                yield f"rollout {rollout} is in step {step_of[rollout]} and in step {step}"
            step_of[rollout] = step
    in_ledger = "SELECT grp || '-' || idx, step FROM rollouts WHERE state IN ('delivered', 'trained')"
    delivered: dict[str, int] = dict(connection.execute(in_ledger).fetchall())
    for rollout in sorted(delivered.keys() - step_of.keys())[:SHOWN_MOST]:
        yield f"rollout {rollout} is delivered in step {delivered[rollout]}, whose manifest does not name it"
    steps = "SELECT step FROM batches WHERE state != ?"
    settled = {step for (step,) in connection.execute(steps, (BatchState.COMPOSED,))}
    for rollout in sorted(step_of.keys() - delivered.keys())[:SHOWN_MOST]:
        if step_of[rollout] in settled:  # any other was sealed after our look at the ledger
            yield f"rollout {rollout} is in the manifest of step {step_of[rollout]}; the ledger does not know"
