"""Training batches: composed as a plan, encoded by rank (writer.py), sealed by a manifest, read by a trainer.

Imports numpy, xxhash and the standard library only, and not the writer: a trainer has nothing else installed.
"""

from headpond.batches.manifest import (
    EncodedRank,
    Manifest,
    manifest_steps,
    read_manifest,
    read_manifests,
    seal_manifest,
)
from headpond.batches.plan import BatchPlan, BatchRollout
from headpond.batches.reader import Batch, BatchReader, MicroBatch
from headpond.batches.signals import RunStatus, TrainerState, read_trainer, write_status

__all__ = [
    "Batch",
    "BatchPlan",
    "BatchReader",
    "BatchRollout",
    "EncodedRank",
    "Manifest",
    "MicroBatch",
    "RunStatus",
    "TrainerState",
    "manifest_steps",
    "read_manifest",
    "read_manifests",
    "read_trainer",
    "seal_manifest",
    "write_status",
]
