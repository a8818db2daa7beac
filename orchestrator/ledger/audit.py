"""Checks that a run adds up: the ledger against itself, against the manifests, and these against the files.

Read-only; the run may continue meanwhile.
"""

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator import run_dir
from penstock.batches import Manifest, read_manifests
from penstock.errors import BlobError
from penstock.ledger import queries, schema
from penstock.store import BlobRef, Store, open_store

SHOWN_MOST = 20  # of any one kind of problem

Progress = Callable[[int, int], None]
"""called with the bytes checked so far and the total"""


def audit(directory: Path, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """`balanced` is true when the counts add up and no problem was found."""
    store = open_store(run_dir.store_url(directory))
    with schema.reading(run_dir.ledger_path(directory)) as connection:
        with queries.snapshot(connection):  # the manifests are read inside: they may only be newer than the ledger
            rollouts = queries.progress(connection)["rollouts"]
            manifests = read_manifests(store)
            problems = [
                *queries.structure_problems(connection, limit=SHOWN_MOST),
                *_delivery_problems(connection, manifests),
            ]
            dead_jobs = queries.dead_jobs(connection, limit=SHOWN_MOST)
        # Outside the snapshot: the run may release files while they are checked.
        problems += islice(_damaged_files(store, manifests, connection, progress), SHOWN_MOST)
    return {
        **rollouts,
        "balanced": rollouts["balanced"] and not problems,
        "problems": problems,
        "steps": len(manifests),
        "dead_jobs": dead_jobs,
    }


def _delivery_problems(connection: sqlite3.Connection, manifests: dict[int, Manifest]) -> Iterator[str]:
    """Each rollout is in one manifest at most, and ledger and manifests name the same ones."""
    step_of: dict[str, int] = {}
    for step, manifest in manifests.items():
        for rollout in (planned.rollout for planned in manifest.plan.rollouts):
            if rollout in step_of:
                yield f"rollout {rollout} is in step {step_of[rollout]} and in step {step}"
            step_of[rollout] = step
    delivered = queries.delivered_rollouts(connection)
    for rollout in sorted(delivered.keys() - step_of.keys())[:SHOWN_MOST]:
        yield f"rollout {rollout} is delivered in step {delivered[rollout]}, whose manifest does not name it"
    steps = queries.delivered_steps(connection)
    for rollout in sorted(step_of.keys() - delivered.keys())[:SHOWN_MOST]:
        if step_of[rollout] in steps:  # any other step was sealed after the snapshot of the ledger
            yield f"rollout {rollout} is in the manifest of step {step_of[rollout]}, but not delivered in the ledger"


@dataclass(frozen=True, kw_only=True)
class SealedFile:
    step: int
    ref: BlobRef
    released: str
    """the ledger's counter of steps whose files of this kind are released"""


def _files_of(manifest: Manifest) -> Iterator[SealedFile]:
    step = manifest.plan.step
    for rank in manifest.ranks:
        yield SealedFile(step=step, ref=rank.file, released="columns_released")
        if rank.rollouts_jsonl:
            yield SealedFile(step=step, ref=rank.rollouts_jsonl, released="")
    for rollout in manifest.plan.rollouts:
        yield SealedFile(step=step, ref=rollout.columns, released="columns_released")
        if rollout.experts:
            yield SealedFile(step=step, ref=rollout.experts, released="experts_released")


def _damaged_files(
    store: Store, manifests: dict[int, Manifest], connection: sqlite3.Connection, progress: Progress
) -> Iterator[str]:
    """Missing and corrupt files of the manifests, unless the run has released them."""
    released = queries.released_steps(connection)
    files = [each for manifest in manifests.values() for each in _files_of(manifest) if each.ref.size]
    files = [each for each in files if each.step >= released.get(each.released, 0)]
    done, total = 0, sum(each.ref.size for each in files)
    for each in files:
        try:
            store.open(each.ref)
        except BlobError as error:
            if each.step >= queries.released_steps(connection).get(each.released, 0):
                yield f"step {each.step}: {error}"
        done += each.ref.size
        progress(done, total)
