"""Checks that a run adds up: the ledger against itself, against the manifests, and these against the files.

The run may continue meanwhile. One manifest is in memory at a time, and the rollouts of one step.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import StrEnum
from heapq import merge
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from headpond.batches import manifest_steps, read_manifest
from headpond.errors import BlobError
from headpond.inspection import run_json
from headpond.ledger import queries, schema
from headpond.ledger.sealed_files import files_of
from headpond.store import Store, atomic, open_store
from headpond.store.opening import run_store_url

SHOWN_MOST = 20  # of any one kind of problem
# In the run directory: the steps that the end of an orchestrator has audited.
AUDITED = "audited.json"

Progress = Callable[[int, int], None]  # called with the bytes checked so far and an estimate of all


class Scope(StrEnum):
    """What is read. Steps are new if no orchestrator has audited them at its end."""

    FULL = "full"  # every rollout, every manifest and every file
    NEW_FILES = "new files"  # every rollout and every manifest, the files of new steps
    # open rollouts, those of new steps, and the ledger's own counts; manifests and files of
    # new steps
    NEW = "new"


def no_progress(done: int, total: int) -> None:
    pass


def audit(directory: Path, progress: Progress = no_progress, scope: Scope = Scope.FULL) -> dict[str, Any]:
    """Read-only. `balanced` is true when the counts add up and no problem was found."""
    run = run_json.read(directory)
    store = open_store(run_store_url(directory, run["store"]))
    with schema.reading(directory / run["ledger"]) as connection:
        with queries.snapshot(connection):  # the manifests are read inside: they may only be newer than the ledger
            counts = queries.progress(connection)
            kept = queries.kept_counts(connection)
            whole = scope is not Scope.NEW
            counted = queries.counted(connection) if whole else kept
            sealed = manifest_steps(store)
            new = min(_audited_steps(directory, run["run"]), counts["step"])
            first = max(queries.released_steps(connection)["manifests_released"], new if scope is Scope.NEW else 0)
            first_files = 0 if scope is Scope.FULL else new
            problems = list(queries.structure_problems(connection, limit=SHOWN_MOST, archive=whole))
            problems += islice(_count_problems(kept, counted), SHOWN_MOST)
            problems += islice(_delivery_problems(store, connection, sealed, first), SHOWN_MOST)
            dead_jobs = queries.dead_jobs(connection, limit=SHOWN_MOST)
        # Outside the snapshot: the run may release files while they are checked.
        new_files = [step for step in sealed if step >= first_files]
        problems += islice(_damaged(store, connection, new_files, progress), SHOWN_MOST)
    planned, fenced = counts["rollouts"]["planned"], counts["rollouts"]["fenced"]
    rollouts = queries.balance(planned, counted.states, counted.reasons, fenced)
    return {
        **rollouts,
        "balanced": rollouts["balanced"] and not problems,
        "problems": problems,
        "steps": len(sealed),
        "delivered_steps": counts["step"],
        "manifests_from": first,
        "files_from": first_files,
        "dead_jobs": dead_jobs,
    }


def audit_at_end(directory: Path, progress: Progress = no_progress) -> dict[str, Any]:
    """Audit what is new since the last time, and remember how far it reaches if it is balanced."""
    result = audit(directory, progress, Scope.NEW)
    if result["balanced"] and result["delivered_steps"]:
        content = {"run": run_json.read(directory)["run"], "steps": result["delivered_steps"]}
        with suppress(OSError):  # the next audit then reads these steps again
            atomic.write(directory / AUDITED, orjson.dumps(content, option=orjson.OPT_INDENT_2))
    return result


def _audited_steps(directory: Path, run: str) -> int:
    """0 if nothing is known."""
    try:
        content: Any = orjson.loads((directory / AUDITED).read_bytes())
        return int(content["steps"]) if content["run"] == run else 0
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def _count_problems(kept: Iterable[Counter[Any]], counted: Iterable[Counter[Any]]) -> Iterator[str]:
    """The counts that the ledger keeps are those of its rows."""
    for kind, expected, actual in zip(("rollouts", "rollouts", "rollouts of evaluations"), kept, counted, strict=True):
        for name in sorted(expected.keys() | actual.keys()):
            if expected[name] != actual[name]:
                yield f"the ledger counts {expected[name]} {kind} as {name} and has {actual[name]}"


def _delivery_problems(store: Store, connection: sqlite3.Connection, sealed: list[int], first: int) -> Iterator[str]:
    """Each rollout is in one manifest at most, and ledger and manifests name the same ones."""
    known = queries.delivered_steps(connection)
    in_ledger = queries.delivered_rollouts(connection, from_step=first)
    in_store = ((step, "") for step in sealed if step >= first)
    for step, rows in groupby(merge(in_store, in_ledger, key=itemgetter(0)), key=itemgetter(0)):
        delivered = {rollout for _, rollout in rows if rollout}
        named = _named(store, step)
        if named is None and delivered:
            yield f"the manifest of step {step} is gone: it delivered {len(delivered):,} rollouts"
        if named is None:
            continue
        for rollout in sorted(delivered - named):
            yield f"rollout {rollout} is delivered in step {step}, whose manifest does not name it"
        for rollout in sorted(named - delivered):
            other = queries.step_of(connection, rollout)
            if other is not None and other != step:
                yield f"rollout {rollout} is in step {other} and in step {step}"
            elif step in known:  # any other step was sealed after the snapshot of the ledger
                yield f"rollout {rollout} is in the manifest of step {step}, but not delivered in the ledger"


def _named(store: Store, step: int) -> set[str] | None:
    """Rollouts in the manifest of `step`; None without one."""
    manifest = read_manifest(store, step)
    return {planned.rollout for planned in manifest.plan.rollouts} if manifest else None


def _damaged(store: Store, connection: sqlite3.Connection, steps: list[int], progress: Progress) -> Iterator[str]:
    """Missing and corrupt files of `steps` that the run has not released."""
    done = 0
    for number, step in enumerate(steps):
        released = queries.released_steps(connection)
        manifest = read_manifest(store, step) if step >= min(released.values()) else None
        files = files_of(manifest) if manifest else ()
        kept = [file for file in files if file.ref.size and step >= released[file.released]]
        # Reading every manifest first, for the exact total, would take longer than most steps' files.
        total = done + sum(file.ref.size for file in kept) * (len(steps) - number)
        for file in kept:
            try:
                store.open(file.ref)
            except BlobError as error:
                if step >= queries.released_steps(connection)[file.released]:
                    yield f"step {step}: {error}"
            done += file.ref.size
            progress(done, total)
