"""What a trainer uses: batches as they are sealed, and its words to the orchestrator. Needs files only, no Redis.

A sealed step is delivered byte for byte the same, however often a trainer comes back to it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.batches.batch_columns import EXTRA, OFFSETS, SAMPLE, SAMPLE_COLUMNS, TOKEN_COLUMNS, Array, rank_metadata
from penstock.batches.manifest import Manifest, manifest_path, read_manifest
from penstock.batches.plan import FIRST_STEP, BatchPlan
from penstock.batches.signals import (
    NOTHING,
    Checkpoint,
    PublishedPolicy,
    RankProgress,
    RunStatus,
    read_progress,
    read_status,
    write_checkpoint,
    write_policy,
    write_progress,
)
from penstock.errors import BatchError, BlobCorrupt, ConfigError, Stalled
from penstock.store import Store, open_store, tensors
from penstock.store.experts import Experts, Layers, Missing

SIGNED = {1: np.dtype("i2"), 2: np.dtype("i4")}  # what holds -1 beside every expert id, by the ids' width in bytes


class Kind(NamedTuple):
    layers: int
    topk: int
    dtype: np.dtype[Any]


class BatchExperts:
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
    routes: BatchExperts

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


class Batch:
    def __init__(self, store: Store, manifest: Manifest, data_rank: int) -> None:
        """Checks every byte of the rank's file; experts are checked when they are asked for."""
        self.step = manifest.plan.step
        self.totals = manifest.totals
        self.plan = manifest.plan
        self._routes = BatchExperts(store, manifest.plan)
        ref = manifest.ranks[data_rank].file
        file = tensors.read(store, ref)
        if file.metadata != rank_metadata(self.step, data_rank):
            raise BlobCorrupt(f"blob {ref.key} is not rank {data_rank} of step {self.step}: {file.metadata}")
        self._arrays = file.arrays

    def __len__(self) -> int:
        return self._arrays["max_seqlen"].size

    def micro_batches(self) -> Iterator[MicroBatch]:
        """As often as one likes, always the same. Every rank has as many."""
        return (self._micro_batch(number) for number in range(len(self)))

    def _micro_batch(self, number: int) -> MicroBatch:
        tokens, samples, segments = (slice(*self._arrays[name][number : number + 2].tolist()) for name in OFFSETS)
        return MicroBatch(
            **{name: self._arrays[name][tokens] for name in TOKEN_COLUMNS},
            cu_seqlens=self._arrays["cu_seqlens"][segments],
            max_seqlen=int(self._arrays["max_seqlen"][number]),
            samples=Samples(**{name: self._arrays[SAMPLE + name][samples] for name in SAMPLE_COLUMNS}),
            extras={name: self._arrays[EXTRA + name][tokens] for name in self.plan.extras},
            routes=self._routes,
        )


# How often a waiting reader looks: soon for a batch that is about to come, at most once a second for one that is not.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0


class BatchReader:
    def __init__(
        self,
        run_dir: str | PathLike[str],
        *,
        data_rank: int,
        data_ranks: int,
        resume_step: int | None = None,
        store: str | None = None,
        timeout_s: float = 3600.0,
    ) -> None:
        """Delivers the steps after `resume_step`, the step of the checkpoint that the trainer comes from; all without.

        `store` is the run's setting of that name, where it has one.
        """
        if not 0 <= data_rank < data_ranks:
            raise ConfigError(f"data_rank {data_rank} is not one of the {data_ranks} data ranks, numbered from 0")
        resumed = NOTHING if resume_step is None else resume_step
        if resumed < NOTHING:
            raise ConfigError(f"resume_step {resumed} is no step: the first one is {FIRST_STEP}")
        self._run_dir = Path(run_dir)
        self._store = open_store(store) if store else Store(self._run_dir / "store")
        self._timeout_s = timeout_s
        before = read_progress(self._run_dir, data_rank)
        self._delivered = resumed
        self._progress = RankProgress(
            data_rank=data_rank,
            data_ranks=data_ranks,
            epoch=before.epoch + 1 if before else 1,
            resume_step=resumed,
            acked=resumed,
        )
        write_progress(self._run_dir, self._progress)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Waits for the next step. Stalled can be caught and the call repeated: nothing is skipped."""
        manifest = self._wait(self._delivered + 1)
        rules, mine = manifest.plan.rules, self._progress
        if manifest.plan.format != "native":
            raise BatchError(f'this run writes format = "{manifest.plan.format}": read its files with prime-rl')
        if rules.data_ranks != mine.data_ranks:
            raise BatchError(
                f"step {manifest.plan.step} was sealed for {rules.data_ranks} data ranks, this reader has "
                f"{mine.data_ranks}: start the trainer with as many as the run's setting data_ranks"
            )
        batch = Batch(self._store, manifest, mine.data_rank)
        self._delivered = batch.step
        return batch

    def ack(self, step: int) -> None:
        """This rank has trained on the steps up to `step`. A step is trained when every rank said so."""
        if step > self._delivered:
            raise BatchError(f"ack({step}): this reader has delivered steps up to {self._delivered} only")
        self._progress = replace(self._progress, acked=max(step, self._progress.acked))
        write_progress(self._run_dir, self._progress)

    def publish_policy(self, version: int, weights: str | PathLike[str] | None = None) -> None:
        """Called by one rank: the engines have, or can load, policy `version`."""
        write_policy(self._run_dir, PublishedPolicy(version=version, weights=fspath(weights) if weights else None))

    def checkpointed(self, step: int) -> None:
        """The trainer can come back to `step`: it will never ask for steps up to this one again, their blobs may go."""
        if step > self._progress.acked:
            raise BatchError(f"checkpointed({step}): this rank acknowledged steps up to {self._progress.acked} only")
        write_checkpoint(self._run_dir, Checkpoint(step=step))

    def _wait(self, step: int) -> Manifest:
        deadline, pause_s = time.monotonic() + self._timeout_s, FIRST_PAUSE_S
        first_status = read_status(self._run_dir)
        while (manifest := read_manifest(self._store, step)) is None:
            status = read_status(self._run_dir)
            if status and status.ended and status.last_step < step:
                raise StopIteration
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Stalled(self._why(step, first_status, status))
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return manifest

    def _why(self, step: int, before: RunStatus | None, now: RunStatus | None) -> str:
        waited = f"no {manifest_path(self._store, step)} in {self._timeout_s:g} s"
        if now is None:
            return f"{waited}, and no orchestrator has written to {self._run_dir}: is it the directory of a run?"
        silent = " (it has said nothing else since the wait began: does it still run?)" if now == before else ""
        return f"{waited}; the orchestrator says: {now.why}{silent}"
