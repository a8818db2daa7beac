"""`python -m bench.harness.trainer RUN_DIR STORE_URL`: a trainer that keeps no step waiting.

Reads the columns of every step, acknowledges it and reports a checkpoint.
"""

import sys

from headpond.batches import BatchReader


def main(run_dir: str, store: str) -> None:
    reader = BatchReader(run_dir, data_rank=0, data_ranks=1, store=store)
    for batch in reader:
        for mb in batch.micro_batches():
            mb.loss_weights.sum()
        reader.ack(batch.step)
        reader.publish_policy(batch.step + 1)
        reader.checkpointed(batch.step)


if __name__ == "__main__":
    main(*sys.argv[1:])
