"""SkyRL: a batch as the `GeneratorOutput` that `GeneratorInterface.generate` returns (skyrl 0.3 and 0.4)."""

from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.batches.reader import Batch
from penstock.trainers.samples import TrainedSample, samples_of


def to_generator_output(batch: Batch, trajectory_class: Any = None) -> dict[str, Any]:
    """`trajectory_class` is SkyRL's `TrajectoryID`. A rollout of several samples is a trajectory of several steps, of
    which the last has the reward."""
    trajectory: Any = trajectory_class or import_module("skyrl.train.generators.base").TrajectoryID
    samples = list(samples_of(batch, routes=True))
    last = [*(one.rollout != other.rollout for one, other in pairwise(samples)), True]
    routed = any(sample.routed_experts is not None for sample in samples)
    return {
        "prompt_token_ids": [sample.input_ids[: sample.prompt_length].tolist() for sample in samples],
        "response_ids": [sample.after_prompt(sample.input_ids) for sample in samples],
        "rewards": [sample.rollout.reward if ends else 0.0 for sample, ends in zip(samples, last, strict=True)],
        "loss_masks": [sample.after_prompt(sample.loss_mask) for sample in samples],
        "stop_reasons": ["length" if sample.truncated else "stop" for sample in samples],
        "rollout_metrics": None,
        "rollout_logprobs": [sample.after_prompt(sample.logprobs) for sample in samples],
        "trajectory_ids": [
            trajectory(instance_id=sample.rollout.group, repetition_id=sample.rollout_number) for sample in samples
        ],
        "trajectory_generation_times": None,
        "rollout_expert_indices": [_routes(sample) for sample in samples] if routed else None,
        "is_last_step": last,
    }


def _routes(sample: TrainedSample) -> list[Any]:
    """[tokens, layers, top-k]; 0 where the engine sent none."""
    return [] if sample.routed_experts is None else np.maximum(sample.routed_experts, 0).tolist()
