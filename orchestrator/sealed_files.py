"""Every byte of what is sealed and not yet released, read again and held against the checksums in the manifests."""

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.batches import Manifest
from penstock.blobs import BlobRef, Store
from penstock.errors import BlobError

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
