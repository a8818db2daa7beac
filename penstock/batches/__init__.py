"""Training batches: composed by a plan, encoded a rank at a time, sealed by a manifest, read by a trainer.

Imports numpy, safetensors, xxhash and the standard library only: a trainer reads batches in a bare environment.
"""

from penstock.batches.manifest import EncodedRank, Manifest, Totals, read_manifest, read_manifests, seal_manifest
from penstock.batches.plan import BatchPlan, BatchRollout
from penstock.batches.reader import Batch, BatchReader, MicroBatch
from penstock.batches.signals import RunStatus, TrainerState, read_trainer, write_status
from penstock.batches.writer import encode_rank

__all__ = [
    "Batch",
    "BatchPlan",
    "BatchReader",
    "BatchRollout",
    "EncodedRank",
    "Manifest",
    "MicroBatch",
    "RunStatus",
    "Totals",
    "TrainerState",
    "encode_rank",
    "read_manifest",
    "read_manifests",
    "read_trainer",
    "seal_manifest",
    "write_status",
]
