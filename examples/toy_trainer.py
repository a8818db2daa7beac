"""A trainer without a model: the calls that a trainer makes to train on the batches of a run. For one with a model, see
numpy_trainer.py.

    python examples/toy_trainer.py RUN_DIR [--resume-step STEP] [--checkpoint-every STEPS]

Needs numpy, xxhash and the files of the run. Needs neither Redis nor Celery.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headpond.batches import Batch, BatchReader


@dataclass(kw_only=True)
class StepSums:
    """Computed in place of a forward and a backward pass."""

    weight: float = 0.0
    weighted_advantage: float = 0.0
    routed_tokens: int = 0
    """tokens with routed experts"""


def train(batch: Batch) -> StepSums:
    has_routes = any(rollout.experts for rollout in batch.plan.rollouts)
    sums = StepSums()
    for mb in batch.micro_batches():  # NumPy views; mb.torch() makes tensors
        sums.weight += float(mb.loss_weights.sum())
        sums.weighted_advantage += float(mb.loss_weights @ mb.advantages)
        if has_routes:  # [tokens, layers, top-k], to replay in the forward pass; -1 where the engine sent none
            routed = mb.routed_experts(missing=-1)
            sums.routed_tokens += int(np.count_nonzero(routed[:, 0, 0] >= 0))
    return sums


def save_weights(run_dir: Path, version: int) -> Path:
    """Weights as `headpond engine` loads them. With engine.weight_update = "headpond", the run loads them."""
    directory = run_dir.resolve() / "weights" / f"version_{version}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "weights.json").write_text(json.dumps({"version": version}))
    return directory


def line(batch: Batch, sums: StepSums) -> str:
    totals = batch.totals
    return (
        f"step {batch.step}: {totals.rollouts:,} rollouts, {totals.tokens:,} tokens in {len(batch)} micro-batches, "
        f"weight {sums.weight:,.0f}, advantage {sums.weighted_advantage / totals.denominator:+.4f}, "
        f"{sums.routed_tokens:,} routed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the batches of a run, without a model.")
    parser.add_argument("run_dir")
    parser.add_argument("--resume-step", type=int, help="the last step that the loaded checkpoint includes")
    parser.add_argument("--checkpoint-every", type=int, default=2, metavar="STEPS", help="0: never")
    options = parser.parse_args()

    reader = BatchReader(options.run_dir, data_rank=0, data_ranks=1, resume_step=options.resume_step)
    for batch in reader:  # waits for the next batch; ends with the run
        print(line(batch, train(batch)), flush=True)
        reader.ack(batch.step)
        version = batch.step + 1
        reader.publish_policy(version, weights=save_weights(Path(options.run_dir), version))
        if options.checkpoint_every and (batch.step + 1) % options.checkpoint_every == 0:
            reader.checkpointed(batch.step)  # after the checkpoint is on disk: blobs up to this step may be deleted


if __name__ == "__main__":
    main()
