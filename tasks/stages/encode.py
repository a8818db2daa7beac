"""Encode: the file of one data rank of a step."""

from typing import Annotated

from pydantic import Field

from headpond import ids
from headpond.batches import BatchPlan, BatchRollout, EncodedRank
from headpond.batches.credit import read_credit
from headpond.batches.plan import step_directory
from headpond.batches.writer import encode_rank
from headpond.broker.queues import Queue
from headpond.errors import BlobCorrupt, BlobMissing
from headpond.records.wire import Result
from headpond.store import Store
from headpond.store.base import is_key
from headpond.store.columns import read_columns
from headpond.tasks import inputs
from headpond.tasks.stage import Call, PlanMessage, Stage, Subject

UNREADABLE_LIMIT = 64  # rollouts named in one reply; the step is formed again without them and may name more


class EncodeMessage(PlanMessage):
    step: int
    data_rank: int


class EncodeResult(Result):
    """The rank's file, or the rollouts whose missing or damaged columns prevented it."""

    rank: EncodedRank | None = None
    unreadable: Annotated[tuple[str, ...], Field(max_length=UNREADABLE_LIMIT)] = ()

    def names_only_files_of(self, execution: ids.LeaseId) -> bool:
        if self.rank is None:
            return True
        job = ids.EncodeJobId.match(execution.job)
        if job is None:
            return False
        directory = step_directory(job.step)
        written = f"{job.data_rank:02d}.{execution.execution}."
        names = f"{directory}/rank_{written}", f"{directory}/rollouts.{execution.execution}."
        keys = [ref.key for ref in (self.rank.file, self.rank.rollouts_jsonl) if ref]
        own = all(is_key(key) and key.startswith(names) and key.rpartition("/")[0] == directory for key in keys)
        return own and self.rank.data_rank == job.data_rank


def encode(call: Call[EncodeMessage]) -> EncodeResult:
    """If rollouts' columns cannot be read, the result names these rollouts, so that the step can be formed without
    them."""
    plan, store = inputs.read(call.store, call.message.plan, BatchPlan), call.store
    jsonl = call.config.batch.rollouts_jsonl
    try:
        rank = encode_rank(
            store, plan, data_rank=call.message.data_rank, execution=call.execution, rollouts_jsonl=jsonl
        )
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


STAGE = Stage(
    name="encode",
    queue=Queue.ENCODING,
    task="headpond.encoding.run",
    subject=Subject.STEP,
    message=EncodeMessage,
    result=EncodeResult,
    body=encode,
    gate="encoding",
)
