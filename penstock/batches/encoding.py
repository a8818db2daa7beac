"""An encoding job's work: one rank of a plan into one file of the store."""

from penstock.batches import rank_file
from penstock.batches.assembly import Assembly
from penstock.batches.manifest import EncodedRank
from penstock.batches.plan import BatchPlan
from penstock.blobs import Store


def encode_rank(store: Store, plan: BatchPlan, *, data_rank: int, execution: str) -> EncodedRank:
    """`execution` is in every name: no execution overwrites another's bytes."""
    assembly = Assembly(store, plan)
    stem = f"{plan.directory}/rank_{data_rank:02d}.{execution}"
    numbers = [number for batch in assembly.packing.ranks[data_rank] for number in batch]
    file, loss_tokens = rank_file.write_rank(assembly, data_rank, f"{stem}.safetensors")
    # By the process that wrote it: on a network file system nobody else can.
    store.sync([file.key])
    return EncodedRank(
        plan=plan.digest,
        data_rank=data_rank,
        file=file,
        micro_batches=len(assembly.packing.ranks[data_rank]),
        tokens=int(assembly.packing.lengths[numbers].sum()),
        samples=len(numbers),
        loss_tokens=loss_tokens,
    )
