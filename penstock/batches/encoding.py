"""An encoding job's work: one rank of a plan into one file of the store, in the plan's format."""

from penstock.batches import prime_rl, rank_file
from penstock.batches.assembly import Assembly
from penstock.batches.manifest import EncodedRank
from penstock.batches.plan import BatchPlan
from penstock.batches.rollouts_jsonl import write_rollouts
from penstock.blobs import Store


def encode_rank(store: Store, plan: BatchPlan, *, data_rank: int, execution: str) -> EncodedRank:
    """`execution` is in every name: no execution overwrites another's bytes."""
    assembly = Assembly(store, plan)
    stem = f"{plan.directory}/rank_{data_rank:02d}.{execution}"
    numbers = [number for batch in assembly.packing.ranks[data_rank] for number in batch]
    match plan.format:
        case "native":
            file, loss_tokens = rank_file.write_rank(assembly, data_rank, f"{stem}.safetensors")
        case "prime-rl":
            file, loss_tokens = prime_rl.write_rank(assembly, data_rank, f"{stem}.bin")
        case "prime-rl-2026-05":
            file, loss_tokens = prime_rl.write_step(assembly, f"{stem}.bin")
            numbers = [number for number, length in enumerate(assembly.packing.lengths) if length]
    jsonl = write_rollouts(store, plan, f"{plan.directory}/rollouts.{execution}.jsonl") if data_rank == 0 else None
    # By the process that wrote them: on a network file system nobody else can.
    store.sync([ref.key for ref in (file, jsonl) if ref])
    return EncodedRank(
        plan=plan.digest,
        data_rank=data_rank,
        file=file,
        rollouts_jsonl=jsonl,
        micro_batches=len(assembly.packing.ranks[data_rank]),
        tokens=int(assembly.packing.lengths[numbers].sum()),
        samples=len(numbers),
        loss_tokens=loss_tokens,
    )
