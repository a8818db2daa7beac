"""slime and miles: a batch as the groups of `Sample` that a `--rollout-function-path` returns.

def rollout(args, rollout_id, data_source, evaluation=False):  # RolloutFnTrainOutput(samples=...)
    return RolloutFnTrainOutput(samples=to_samples(next(reader)))
"""

from importlib import import_module
from typing import Any

import numpy as np

from headpond.batches.reader import Batch
from headpond.trainers.samples import TrainedSample, samples_of


def to_samples(batch: Batch, sample_class: Any = None) -> list[list[Any]]:
    """Convert a batch to one list per group. `sample_class` is slime's or miles' `Sample`;
    default: slime's. The reward is the environment's. `metadata["advantage"]` has Headpond's
    estimate, for `--custom-convert-samples-to-train-data-path`."""
    kind: Any = sample_class or import_module("slime.utils.types").Sample
    groups: dict[int, list[Any]] = {}
    for index, sample in enumerate(samples_of(batch, routes=True)):
        groups.setdefault(sample.group, []).append(_converted(kind, index, sample))
    return list(groups.values())


def _converted(kind: Any, index: int, sample: TrainedSample) -> Any:
    routes = sample.routed_experts
    return kind(
        group_index=sample.group,
        index=index,
        tokens=sample.input_ids.tolist(),
        response_length=sample.input_ids.size - sample.prompt_length,
        reward=sample.rollout.reward,
        loss_mask=sample.after_prompt(sample.loss_mask),
        rollout_log_probs=sample.after_prompt(sample.logprobs),
        # The last token was never an input and has no routes. Rows that the engine did not send are
        # 0.
        rollout_routed_experts=None if routes is None else np.maximum(routes[:-1], 0).astype(np.int32),
        weight_versions=[str(version) for version in np.unique(sample.versions[sample.versions >= 0])],
        status=kind.Status.TRUNCATED if sample.truncated else kind.Status.COMPLETED,
        metadata={"rollout": sample.rollout.rollout, "advantage": sample.advantage},
    )
