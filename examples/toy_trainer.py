"""A trainer without a model: all that yours has to do to train from the batches of a run.

    python examples/toy_trainer.py RUN_DIR [--resume-step STEP] [--checkpoint-every STEPS]

Needs numpy, safetensors and xxhash, and the files of the run: no Redis, no Celery.
"""

import argparse
from dataclasses import dataclass

import numpy as np

from penstock.batches import Batch, BatchReader


@dataclass(kw_only=True)
class Trained:
    """What this one does with a step in place of a forward and a backward pass."""

    weight: float = 0.0
    weighted_advantage: float = 0.0
    routed_tokens: int = 0
    """tokens whose experts are known"""


def train(batch: Batch) -> Trained:
    has_routes = any(rollout.experts for rollout in batch.plan.rollouts)
    done = Trained()
    for mb in batch.micro_batches():  # NumPy views; mb.torch() makes tensors
        done.weight += float(mb.loss_weights.sum())
        done.weighted_advantage += float(mb.loss_weights @ mb.advantages)
        if has_routes:  # [tokens, layers, top-k], to be replayed in the forward pass; -1 where the engine sent none
            routed = mb.routed_experts(missing=-1)
            done.routed_tokens += int(np.count_nonzero(routed[:, 0, 0] >= 0))
    return done


def line(batch: Batch, done: Trained) -> str:
    totals = batch.totals
    return (
        f"step {batch.step}: {totals.rollouts:,} rollouts, {totals.tokens:,} tokens in {len(batch)} micro-batches, "
        f"weight {done.weight:,.0f}, advantage {done.weighted_advantage / totals.denominator:+.4f}, "
        f"{done.routed_tokens:,} routed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the batches of a run, without a model.")
    parser.add_argument("run_dir")
    parser.add_argument("--resume-step", type=int, help="the last step before the checkpoint that you come from")
    parser.add_argument("--checkpoint-every", type=int, default=2, metavar="STEPS", help="0: never")
    options = parser.parse_args()

    reader = BatchReader(options.run_dir, data_rank=0, data_ranks=1, resume_step=options.resume_step)
    for batch in reader:  # waits for the next one; ends with the run
        print(line(batch, train(batch)), flush=True)
        reader.ack(batch.step)
        # Here you would push the new weights to the engine; then rollouts are played with the next version.
        reader.publish_policy(batch.step + 1)
        if options.checkpoint_every and (batch.step + 1) % options.checkpoint_every == 0:
            reader.checkpointed(batch.step)  # once the checkpoint is safe: the blobs up to this step may go


if __name__ == "__main__":
    main()
