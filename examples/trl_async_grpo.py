"""TRL's AsyncGRPOTrainer trains on the steps of a run, with the advantages that the run computed.

    python examples/trl_async_grpo.py RUN_DIR MODEL_DIR OUTPUT_DIR

The run has `batch.data_ranks = 1` and `engine.weight_update = "headpond"`; `max_steps` is the number of its steps times
the samples of a step over TRL's batch.
"""

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from headpond.trainers.trl import HeadpondWorker
from headpond.trainers.weights import PublishedWeights

PLACEHOLDER = Dataset.from_dict({"prompt": [""]})  # prompts come with the samples


def main(run_dir: str, model_dir: str, output_dir: str, **options: Any) -> AsyncGRPOTrainer:
    weights = PublishedWeights(model_dir, Path(output_dir) / "weights")
    # TRL's token budget bounds a row; the engine's server is not asked for it.
    settings = {"max_staleness": 8, "token_budget": 32_768, "weight_sync_steps": 1, "max_steps": 100, **options}
    trainer = AsyncGRPOTrainer(
        model=model_dir,
        args=AsyncGRPOConfig(output_dir=output_dir, **settings),
        train_dataset=PLACEHOLDER,
        rollout_worker=HeadpondWorker(run_dir, weights),
        weight_transfer=weights,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:4])
