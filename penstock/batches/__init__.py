"""Training batches: composed by a plan, encoded a rank at a time, sealed by a manifest, read by a trainer.

Imports numpy, safetensors, xxhash and the standard library only: a trainer reads batches in a bare environment.
"""

from penstock.batches.encoding import encode_rank
from penstock.batches.manifest import EncodedRank, Manifest, Totals, read_manifest, seal_manifest
from penstock.batches.plan import BatchPlan, PlannedRollout

__all__ = [
    "BatchPlan",
    "EncodedRank",
    "Manifest",
    "PlannedRollout",
    "Totals",
    "encode_rank",
    "read_manifest",
    "seal_manifest",
]
