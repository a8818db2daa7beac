"""Encodes one data rank of a step. If rollouts' columns cannot be read, the result names the rollouts, so that the step
can be formed without them."""

from penstock.batches import BatchPlan, BatchRollout
from penstock.batches.credit import read_credit
from penstock.batches.writer import encode_rank
from penstock.errors import BlobCorrupt, BlobMissing
from penstock.messages import UNREADABLE_LIMIT, EncodeResult
from penstock.store import Store
from penstock.store.columns import read_columns


def encode(
    store: Store, plan: BatchPlan, *, data_rank: int, execution: str, rollouts_jsonl: bool = False
) -> EncodeResult:
    try:
        rank = encode_rank(store, plan, data_rank=data_rank, execution=execution, rollouts_jsonl=rollouts_jsonl)
        return EncodeResult(rank=rank)
    except (BlobMissing, BlobCorrupt):
        unreadable = [rollout.rollout for rollout in plan.rollouts if not _readable(store, rollout)]
        if not unreadable:
            raise
        return EncodeResult(unreadable=tuple(unreadable[:UNREADABLE_LIMIT]))


def _readable(store: Store, rollout: BatchRollout) -> bool:
    try:
        read_columns(store, rollout.columns)
        if rollout.credit:
            read_credit(store, rollout.credit)
    except (BlobMissing, BlobCorrupt):
        return False
    return True
