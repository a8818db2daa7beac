"""SkyRL: a batch as the `GeneratorOutput` that `GeneratorInterface.generate` returns (skyrl
0.4)."""

from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from headpond.batches.manifest import RECORDED, Array
from headpond.batches.reader import Batch
from headpond.trainers.samples import TrainedSample, samples_of


def to_generator_output(batch: Batch, trajectory_class: Any = None) -> dict[str, Any]:
    """Convert a batch. `trajectory_class` is SkyRL's `TrajectoryID`. A rollout of several
    samples is a trajectory of several steps, and the last step has the reward: set
    `generator.step_wise_trajectories=true` if the run has such rollouts."""
    trajectory: Any = trajectory_class or import_module("skyrl.train.generators.base").TrajectoryID
    samples = list(samples_of(batch, routes=True))
    last = [*(one.rollout != other.rollout for one, other in pairwise(samples)), True]
    routed = all(sample.routed_experts is not None for sample in samples)
    widest = max((int(np.diff(sample.support_offsets).max(initial=0)) for sample in samples), default=0)
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
        # SkyRL 0.4 takes arrays and refuses the lists that 0.3 took.
        "rollout_expert_indices": [_routes(sample.routed_experts) for sample in samples] if routed else None,
        "rollout_sample_support": [_support(sample, widest) for sample in samples] if widest else None,
        "is_last_step": last,
    }


def _routes(rows: Array | None) -> Array:
    """Return routes [tokens, layers, top-k] in the smallest of SkyRL's dtypes; 0 where the
    engine sent none."""
    sent = np.maximum(rows if rows is not None else np.empty(0), 0)
    return sent.astype(np.uint8 if sent.max(initial=0) < 256 else np.int16)


def _support(sample: TrainedSample, widest: int) -> Array:
    """Return the tokens that each token after the prompt was drawn from, padded with -1. A row
    of -1 alone was not recorded."""
    lengths = np.diff(sample.support_offsets)[:, None]
    rows = np.full((lengths.size, widest), -1, np.int32)
    rows[np.arange(widest) < lengths] = sample.support_ids
    rows[sample.sampling != RECORDED] = -1
    return rows[sample.prompt_length :]
