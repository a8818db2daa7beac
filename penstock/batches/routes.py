"""The routed experts of a batch, for a reader: rollouts' `experts` files, opened and checked when first asked for."""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.batches.plan import BatchPlan
from penstock.batches.schema import Array
from penstock.blobs import Store
from penstock.blobs.experts import Experts, Layers, Missing
from penstock.errors import BatchError

SIGNED = {1: np.dtype("i2"), 2: np.dtype("i4")}  # what holds -1 beside every expert id, by the ids' width in bytes


class Kind(NamedTuple):
    layers: int
    topk: int
    dtype: np.dtype[Any]


class BatchRoutes:
    def __init__(self, store: Store, plan: BatchPlan) -> None:
        self._store, self._rollouts, self._step = store, plan.rollouts, plan.step
        self._opened: dict[int, Experts] = {}

    @cached_property
    def kind(self) -> Kind:
        """The same on every rank, also on one whose own samples have no experts."""
        for rollout in self._rollouts:
            if rollout.experts:
                return _kind(Experts(self._store, rollout.experts))
        raise BatchError(f"no rollout of step {self._step} has routed experts: was the engine asked to return them?")

    def new_rows(self, tokens: int, layers: Layers, missing: Missing) -> Array:
        """Space, not yet filled, for the rows of so many tokens."""
        count, topk, dtype = self.kind
        shape = (tokens, np.arange(count)[layers].size, topk)
        return np.empty(shape, SIGNED[dtype.itemsize] if missing == -1 else dtype)

    def filling(self, missing: Missing) -> Array:
        """What stands where nobody sent a row."""
        return np.arange(self.kind.topk) if missing == "dummy" else np.array(missing)

    def open(self, rollout_index: int) -> Experts | None:
        ref = self._rollouts[rollout_index].experts
        if ref is None:
            return None
        if rollout_index not in self._opened:
            experts = Experts(self._store, ref)
            if _kind(experts) != self.kind:
                raise BatchError(f"{ref.key} holds experts of {_kind(experts)}, other rollouts of {self.kind}")
            self._opened[rollout_index] = experts
        return self._opened[rollout_index]


def _kind(experts: Experts) -> Kind:
    _, layers, topk = experts.rows.shape
    return Kind(layers, topk, experts.rows.dtype)
