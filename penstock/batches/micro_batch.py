"""One micro-batch, as a trainer sees it: views of the rank's file, and the routed experts on demand."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.batches.routes import BatchRoutes
from penstock.batches.schema import TOKEN_COLUMNS, Array
from penstock.blobs.experts import Experts, Layers, Missing
from penstock.errors import BatchError


@dataclass(frozen=True, kw_only=True)
class Samples:
    """One entry a sample of the micro-batch, in the order of its segments; padding has none."""

    rollout_index: Array
    """in `batch.plan.rollouts`"""
    group_index: Array
    """in `batch.plan.groups`"""
    env_index: Array
    """in `batch.plan.envs`"""
    sample_in_rollout: Array
    rollout_offset: Array
    """where the sample begins among all tokens of its rollout"""
    loss_tokens: Array
    rollout_loss_tokens: Array
    """in all samples of its rollout, on whatever rank"""
    truncated: Array
    version_first: Array
    version_last: Array
    reward: Array


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    input_ids: Array
    position_ids: Array
    """restart with every sample, and with the padding"""
    loss_mask: Array
    loss_weights: Array
    """0 outside the loss; the sum of loss_weights * loss over all ranks / `batch.totals.denominator` is the mean"""
    logprobs: Array
    """of each token at its own index, under the policy that sampled it; 0 on context"""
    advantages: Array
    temperatures: Array
    versions: Array
    """-1 on context"""
    cu_seqlens: Array
    """bounds of the segments, from 0; padding is the last segment"""
    max_seqlen: int
    samples: Samples
    extras: dict[str, Array]
    routes: BatchRoutes

    def routed_experts(self, *, layers: Layers = slice(None), missing: Missing = -1) -> Array:
        """Expert ids [tokens, layers, topk]. Where nobody sent any: -1 (then signed), 0, or the valid route "dummy"."""
        rows = self.routes.new_rows(self.input_ids.size, layers, missing)
        for sample, where, experts in self._segments():
            if experts:
                inside = int(self.samples.sample_in_rollout[sample])
                experts.read(inside, 0, where.stop - where.start, rows[where], layers=layers, missing=missing)
            else:
                rows[where] = self.routes.filling(missing)
        return rows

    def routed_valid(self) -> Array:
        """u8[tokens]: 1 where the engine's own routing is known."""
        valid = np.zeros(self.input_ids.size, np.uint8)
        for sample, where, experts in self._segments():
            if experts:
                first = int(self.samples.rollout_offset[sample])
                valid[where] = experts.routed_valid[first : first + where.stop - where.start]
        return valid

    def torch(self) -> dict[str, Any]:
        """Tensors of all columns, `cu_seqlens` and extras by name: copies, because the file is mapped read-only."""
        try:
            import torch  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise BatchError("torch is not installed here: install it, or use the NumPy arrays") from error
        columns = {name: getattr(self, name) for name in (*TOKEN_COLUMNS, "cu_seqlens")}
        return {name: torch.from_numpy(array.copy()) for name, array in {**columns, **self.extras}.items()}

    def _segments(self) -> Iterator[tuple[int, slice, Experts | None]]:
        """Number, place and experts of each segment; padding, which is no sample, has none."""
        for number, (start, stop) in enumerate(pairwise(self.cu_seqlens.tolist())):
            is_sample = number < self.samples.rollout_index.size
            experts = self.routes.open(int(self.samples.rollout_index[number])) if is_sample else None
            yield number, slice(start, stop), experts
