"""Checks that a run adds up: the ledger against itself, against the manifests, and these against the files.

The run may continue meanwhile. One manifest is in memory at a time, and the rollouts of one step.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import merge
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from headpond.batches import Manifest, manifest_steps, read_manifest
from headpond.errors import BlobError
from headpond.inspection import run_json
from headpond.ledger import evaluations, queries, schema
from headpond.ledger.states import RolloutState
from headpond.orchestrator import run_dir
from headpond.orchestrator.duties.housekeeping import Reported
from headpond.store import BlobRef, Store, open_store

SHOWN_MOST = 20  # of any one kind of problem
AUDITED = "audited.json"
"""In the run directory: the steps that the end of an orchestrator has audited."""

Progress = Callable[[int, int], None]
"""called with the bytes checked so far and an estimate of all"""


class Scope(StrEnum):
    """What is read. Steps are new if no orchestrator has audited them at its end."""

    FULL = "full"
    """every rollout, every manifest and every file"""
    NEW_FILES = "new files"
    """every rollout and every manifest, the files of new steps"""
    NEW = "new"
    """open rollouts, those of new steps, and the ledger's own counts; manifests and files of new steps"""


def no_progress(done: int, total: int) -> None:
    pass


def audit(directory: Path, progress: Progress = no_progress, scope: Scope = Scope.FULL) -> dict[str, Any]:
    """Read-only. `balanced` is true when the counts add up and no problem was found."""
    store = open_store(run_dir.store_url(directory))
    with schema.reading(run_json.ledger_path(directory)) as connection:
        with queries.snapshot(connection):  # the manifests are read inside: they may only be newer than the ledger
            counts = queries.progress(connection)
            kept = queries.rollouts_by_state(connection), queries.rollouts_by_reason(connection)
            whole = scope is not Scope.NEW
            states, reasons = queries.counted(connection) if whole else kept
            sealed = manifest_steps(store)
            new = min(_audited_steps(directory), counts["step"])
            first = max(queries.released_steps(connection)["manifests_released"], new if scope is Scope.NEW else 0)
            first_files = 0 if scope is Scope.FULL else new
            problems = list(queries.structure_problems(connection, limit=SHOWN_MOST, archive=whole))
            problems += islice(_count_problems(kept, states, reasons), SHOWN_MOST)
            problems += evaluations.problems(connection, limit=SHOWN_MOST)
            problems += islice(_delivery_problems(store, connection, sealed, first), SHOWN_MOST)
            dead_jobs = queries.dead_jobs(connection, limit=SHOWN_MOST)
        # Outside the snapshot: the run may release files while they are checked.
        files = Files(store, connection, [step for step in sealed if step >= first_files])
        problems += islice(files.damaged(progress), SHOWN_MOST)
    rollouts = queries.balance(counts["rollouts"]["planned"], states, reasons, counts["rollouts"]["fenced"])
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
        with Reported(f"remember in {directory / AUDITED} what was audited"):
            content = {"run": run_dir.read(directory)["run"], "steps": result["delivered_steps"]}
            run_dir.write_json(directory / AUDITED, content)
    return result


def _audited_steps(directory: Path) -> int:
    """0 if nothing is known."""
    try:
        content: Any = orjson.loads((directory / AUDITED).read_bytes())
        return int(content["steps"]) if content["run"] == run_dir.read(directory)["run"] else 0
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def _count_problems(
    kept: tuple[Counter[RolloutState], Counter[str]], states: Counter[RolloutState], reasons: Counter[str]
) -> Iterator[str]:
    """The counts that the ledger keeps are those of its rows."""
    kept_states, kept_reasons = kept
    for state in RolloutState:
        if states[state] != kept_states[state]:
            yield f"the ledger counts {kept_states[state]} rollouts as {state} and has {states[state]}"
    for reason in sorted(reasons.keys() | kept_reasons.keys()):
        if reasons[reason] != kept_reasons[reason]:
            yield f"the ledger counts {kept_reasons[reason]} rollouts as {reason} and has {reasons[reason]}"


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


@dataclass(frozen=True, kw_only=True)
class SealedFile:
    ref: BlobRef
    released: str
    """the ledger's counter of steps whose files of this kind are released"""


def files_of(manifest: Manifest) -> Iterator[SealedFile]:
    """In the order in which files of a kind are deleted when their step is released."""
    for rollout in manifest.plan.rollouts:
        yield SealedFile(ref=rollout.columns, released="columns_released")
        if rollout.experts:
            yield SealedFile(ref=rollout.experts, released="experts_released")
    for rank in manifest.ranks:
        yield SealedFile(ref=rank.file, released="columns_released")
        if rank.rollouts_jsonl:
            yield SealedFile(ref=rank.rollouts_jsonl, released="jsonl_released")


class Files:
    """The files of `steps` that the run has not released."""

    def __init__(self, store: Store, connection: sqlite3.Connection, steps: list[int]) -> None:
        self._store = store
        self._connection = connection
        self._steps = steps

    def damaged(self, progress: Progress) -> Iterator[str]:
        """Missing and corrupt ones."""
        done = 0
        for number, step in enumerate(self._steps):
            files = list(self._of(step))
            # Reading every manifest first, for the exact total, would take longer than most steps' files.
            total = done + sum(each.ref.size for each in files) * (len(self._steps) - number)
            for each in files:
                try:
                    self._store.open(each.ref)
                except BlobError as error:
                    if not self._is_released(each, step):
                        yield f"step {step}: {error}"
                done += each.ref.size
                progress(done, total)

    def _of(self, step: int) -> Iterator[SealedFile]:
        released = queries.released_steps(self._connection)
        manifest = read_manifest(self._store, step) if step >= min(released.values()) else None
        files = files_of(manifest) if manifest else ()
        return (each for each in files if each.ref.size and step >= released[each.released])

    def _is_released(self, file: SealedFile, step: int) -> bool:
        return step < queries.released_steps(self._connection)[file.released]
