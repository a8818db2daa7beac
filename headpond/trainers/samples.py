"""The samples of a batch one by one, in the form that other trainers take: a prompt and
everything after it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from headpond.batches.manifest import Array
from headpond.batches.plan import BatchRollout
from headpond.batches.reader import Batch
from headpond.ids import RolloutId


@dataclass(frozen=True, kw_only=True)
class TrainedSample:
    """One sample, as views of a micro-batch; one entry per token."""

    rollout: BatchRollout
    sample_in_rollout: int
    group: int
    """Index of the sample's group in `batch.plan.groups`."""
    input_ids: Array
    loss_mask: Array
    logprobs: Array
    advantages: Array
    versions: Array
    sampling: Array
    truncated: bool
    routed_experts: Array | None
    """[tokens, layers, top-k], -1 where the engine sent none. None if no rollout of the step has
    any."""
    support_ids: Array
    support_offsets: Array
    """Token t was drawn from `support_ids[support_offsets[t] : support_offsets[t + 1]]`, if that
    is recorded."""

    @property
    def rollout_number(self) -> int:
        """Index of the sample's rollout in the group."""
        return RolloutId.parse(self.rollout.rollout).number

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first one that the policy sampled."""
        sampled = np.flatnonzero(self.versions >= 0)
        return int(sampled[0]) if sampled.size else int(self.input_ids.size)

    @property
    def completions(self) -> int:
        """Number of runs of sampled tokens."""
        return int(np.count_nonzero(np.diff(self.versions >= 0, prepend=False)[self.versions >= 0]))

    @property
    def advantage(self) -> float:
        """The mean over trained tokens, for trainers with one advantage a sample."""
        trained = self.advantages[self.loss_mask != 0]
        return float(trained.mean()) if trained.size else 0.0

    def after_prompt(self, column: Array) -> list[Any]:
        return column[self.prompt_length :].tolist()


def samples_of(batch: Batch, *, routes: bool = False) -> Iterator[TrainedSample]:
    """Yield samples in the order of groups, rollouts and samples. `routes` adds routed experts,
    if the step has any."""
    samples = list[TrainedSample]()
    routed = routes and any(rollout.experts for rollout in batch.plan.rollouts)
    for mb in batch.micro_batches():
        experts = mb.routed_experts(missing=-1) if routed else None
        support = mb.sampling_support()
        for number, (start, stop) in enumerate(pairwise(mb.cu_seqlens[: len(mb.samples) + 1].tolist())):
            columns = ("input_ids", "loss_mask", "logprobs", "advantages", "versions", "sampling")
            samples.append(
                TrainedSample(
                    rollout=batch.plan.rollouts[int(mb.samples.rollout_index[number])],
                    sample_in_rollout=int(mb.samples.sample_in_rollout[number]),
                    group=int(mb.samples.group_index[number]),
                    truncated=bool(mb.samples.truncated[number]),
                    routed_experts=experts[start:stop] if experts is not None else None,
                    support_ids=support.ids[support.offsets[start] : support.offsets[stop]],
                    support_offsets=support.offsets[start : stop + 1] - support.offsets[start],
                    **{name: getattr(mb, name)[start:stop] for name in columns},
                )
            )
    yield from sorted(samples, key=lambda sample: (sample.group, sample.rollout.rollout, sample.sample_in_rollout))
