"""A trainer to begin with: the calls that a trainer makes. Put your forward and backward pass in place of the mean.

    python trainer.py RUN_DIR

Started again, it resumes after its checkpoint, which here is the number of the step alone.
"""

import sys
from pathlib import Path

import numpy as np

from headpond import BatchReader

if len(sys.argv) != 2:
    sys.exit("which run? python trainer.py RUN_DIR, with `run_dir` of run.toml")
run_dir = Path(sys.argv[1])
checkpoint = run_dir / "checkpoint.txt"
resume_step = int(checkpoint.read_text()) if checkpoint.exists() else None
reader = BatchReader(run_dir, data_rank=0, data_ranks=1, resume_step=resume_step)
for batch in reader:  # waits for the next step; ends with the run
    loss = 0.0
    for mb in batch.micro_batches():  # NumPy views; mb.torch() makes tensors
        loss -= float(np.sum(mb.logprobs * mb.advantages * mb.loss_weights)) / batch.totals.denominator
        # backward pass and optimiser
    totals = batch.totals
    print(f"step {batch.step}: {totals.rollouts:,} rollouts, {totals.tokens:,} tokens, loss {loss:+.4f}", flush=True)
    reader.ack(batch.step)
    reader.publish_policy(batch.step + 1)  # when the engine has the new weights
    checkpoint.write_text(str(batch.step))
    reader.checkpointed(batch.step)  # files up to this step may be deleted
