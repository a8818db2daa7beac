"""TRL's GRPOTrainer trains on the steps of a run; it computes advantages itself, from the environment's rewards.

    python examples/trl_grpo.py RUN_DIR MODEL_DIR OUTPUT_DIR

The run has `rollouts.group_size` = TRL's `num_generations`, `rollouts.partial_groups = "drop"`,
`policy.max_samples = 1` and `batch.size` = TRL's batch over `num_generations`.
"""

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from headpond.trainers.trl import HeadpondRollouts
from headpond.trainers.weights import PublishedWeights

PLACEHOLDER = Dataset.from_dict({"prompt": ["-"] * 1024})  # each step's own prompts take the place of these


def main(run_dir: str, model_dir: str, output_dir: str, **options: Any) -> GRPOTrainer:
    rollouts = HeadpondRollouts(run_dir, PublishedWeights(model_dir, Path(output_dir) / "weights"))
    trainer = GRPOTrainer(
        model=model_dir,
        args=GRPOConfig(output_dir=output_dir, **options),
        train_dataset=PLACEHOLDER,
        reward_funcs=rollouts.reward,
        rollout_func=rollouts,
    )
    trainer.train()
    rollouts.acknowledge(trainer)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:4])
