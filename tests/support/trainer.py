"""A trainer as a user would write it, in an environment with numpy, xxhash and headpond only.

    python trainer.py RUN_DIR DATA_RANK DATA_RANKS RESUME_STEP [HANG_AT_STEP [CHECKPOINT_EVERY]]

Prints a line of JSON for every step, with a hash of all data; at HANG_AT_STEP it stops in the middle of reading.
"""

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

BARE = {*sys.stdlib_module_names, "numpy", "xxhash", "headpond", *os.environ.get("TRAINER_HAS", "").split(",")}


class Refusing(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] not in BARE:
            raise ImportError(f"a trainer's environment has no {name}")


def write_line(**fields: int | str) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(run_dir: str, data_rank: int, data_ranks: int, resume_step: int, hang_at: int = -1, every: int = 5) -> None:
    from xxhash import xxh3_64

    from headpond.batches import BatchReader

    reader = BatchReader(
        Path(run_dir), data_rank=data_rank, data_ranks=data_ranks, resume_step=resume_step, timeout_s=120
    )
    for batch in reader:
        digest = xxh3_64()
        for mb in batch.micro_batches():
            columns = [mb.input_ids, mb.position_ids, mb.loss_mask, mb.loss_weights, mb.logprobs, mb.advantages]
            for array in [*columns, mb.temperatures, mb.versions, mb.cu_seqlens, mb.samples.reward]:
                digest.update(array.tobytes())
            digest.update(mb.routed_experts(missing=-1).tobytes())
            if batch.step == hang_at:
                write_line(hangs=batch.step)
                sys.stdin.read()
        write_line(step=batch.step, hash=digest.hexdigest())
        reader.ack(batch.step)
        if data_rank == 0:
            reader.publish_policy(batch.step + 1, weights=f"/weights/{batch.step}")
        if batch.step % every == 0:
            reader.checkpointed(batch.step)


if __name__ == "__main__":
    sys.meta_path.insert(0, Refusing())
    main(sys.argv[1], *map(int, sys.argv[2:]))
