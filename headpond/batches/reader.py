"""The trainer's side: reads sealed batches and reports progress to the orchestrator. Needs files only, no Redis.

BatchReader waits for steps, a Batch is one rank of a step, a MicroBatch holds arrays. A sealed step is the same, byte
for byte, every time it is read.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headpond.batches.annotations import NAMES_MOST, write_annotations
from headpond.batches.manifest import (
    ADDED_COLUMNS,
    AGENTS,
    OFFSETS,
    RECORDED,
    SAMPLE,
    SAMPLE_COLUMNS,
    SAMPLE_FIELD,
    TOKEN_COLUMNS,
    TOKEN_FIELD,
    Array,
    Manifest,
    manifest_key,
    rank_metadata,
    read_manifest,
)
from headpond.batches.plan import FIRST_STEP, BatchPlan
from headpond.batches.signals import (
    NOTHING,
    Checkpoint,
    PublishedPolicy,
    RankProgress,
    RunStatus,
    read_progress,
    read_start,
    read_status,
    remove_leftovers,
    write_checkpoint,
    write_policy,
    write_progress,
)
from headpond.errors import BatchError, BlobCorrupt, BlobMissing, ConfigError, Stalled
from headpond.store import Store, open_store, tensors
from headpond.store.columns import Columns, read_columns
from headpond.store.experts import Experts, Layers, Missing
from headpond.store.opening import read_run_store_url, run_store_url

DEFAULT_STORE = "store"  # used by a run that has no such setting: a directory of its run directory
# Seconds between two polls for the next step: the first, doubled up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0
SIGNED = {1: np.dtype("i2"), 2: np.dtype("i4")}  # bytes of an expert id -> the dtype that also holds -1


class BatchReader:
    """Iterates over the sealed steps of a run, for one data rank, and reports the trainer's progress."""

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
        """`resume_step` is the step of the checkpoint that the trainer loaded: later steps are delivered. Default: all.

        `store` is a URL as in the setting of that name. Default: the store that the run directory names.
        """
        if not 0 <= data_rank < data_ranks:
            raise ConfigError(f"data_rank {data_rank} is not one of the {data_ranks} data ranks, numbered from 0")
        resumed = NOTHING if resume_step is None else resume_step
        if resumed < NOTHING:
            raise ConfigError(f"resume_step {resumed} is not a step: the first one is {FIRST_STEP}")
        self._run_dir = Path(run_dir)
        self._store_url = store
        self._open_store()  # refuses a store that cannot be opened, before the first wait
        self._timeout_s = timeout_s
        remove_leftovers(self._run_dir, data_rank)
        previous = read_progress(self._run_dir, data_rank)
        self._delivered = resumed
        self._progress = RankProgress(
            data_rank=data_rank,
            data_ranks=data_ranks,
            epoch=previous.epoch + 1 if previous else 1,
            resume_step=resumed,
            acked=resumed,
        )
        write_progress(self._run_dir, self._progress)

    def __iter__(self) -> "Iterator[Batch]":
        return self

    def __next__(self) -> "Batch":
        """Wait for the next step. After Stalled the call can be repeated: no step is skipped."""
        manifest = self._wait(self._delivered + 1)
        rules, rank = manifest.plan.rules, self._progress
        if manifest.plan.format != "native":
            raise BatchError(f'this run writes format = "{manifest.plan.format}": read its files with prime-rl')
        if rules.data_ranks != rank.data_ranks:
            raise BatchError(
                f"step {manifest.plan.step} was sealed for {rules.data_ranks} data ranks, this reader has "
                f"{rank.data_ranks}: start the trainer with as many ranks as batch.data_ranks"
            )
        batch = Batch(self._open_store(), manifest, rank.data_rank)
        self._delivered = batch.step
        return batch

    def ack(self, step: int) -> None:
        """Report that this rank has trained on the steps up to `step`. A step is trained when every rank has."""
        if step > self._delivered:
            raise BatchError(f"ack({step}): this reader has delivered steps up to {self._delivered} only")
        self._progress = replace(self._progress, acked=max(step, self._progress.acked))
        write_progress(self._run_dir, self._progress)

    @property
    def start_version(self) -> int:
        """The engine's version when the run began: 0, unless its weights were called by a number. Read it when the
        first step is there. The weights of step n are version `start_version + n + 1`."""
        start = read_start(self._run_dir)
        return start.version if start else 0

    def publish_policy(self, version: int, weights: str | PathLike[str] | None = None) -> None:
        """Report that the engines have, or can load, policy `version`. One rank calls it. A relative directory is
        one of the trainer's. It is made absolute: the engine that loads it has a working directory of its own."""
        policy = PublishedPolicy(version=version, weights=str(Path(weights).absolute()) if weights else None)
        write_policy(self._run_dir, policy, data_rank=self._progress.data_rank)

    def checkpointed(self, step: int) -> None:
        """Report a checkpoint: the trainer will not read steps up to `step` again, so their blobs may be deleted."""
        if step > self._progress.acked:
            raise BatchError(f"checkpointed({step}): this rank acknowledged steps up to {self._progress.acked} only")
        write_checkpoint(self._run_dir, Checkpoint(step=step), data_rank=self._progress.data_rank)

    def annotate(self, batch: "Batch", **columns: Sequence[Any]) -> None:
        """Add the trainer's values for this rank's tokens, for inspection. Values of the newest steps are kept.
        `logprobs=[one array per micro-batch]` gives the mismatch with the sampler. Any other names are allowed."""
        if len(columns) > NAMES_MOST:
            raise BatchError(f"annotate: at most {NAMES_MOST} names, not {len(columns)}")
        arrays = {
            name: np.concatenate([np.asarray(part, np.float32).reshape(-1) for part in parts])
            for name, parts in columns.items()
        }
        batch_columns = {name: batch.column(name) for name in ("logprobs", "loss_mask")}
        write_annotations(self._run_dir, batch.step, self._progress.data_rank, arrays, **batch_columns)

    def _open_store(self) -> Store:
        """Open the run's store. Its URL is looked up until the run has begun: a trainer may start
        before it."""
        self._store_url = self._store_url or read_run_store_url(self._run_dir)
        return open_store(self._store_url or run_store_url(self._run_dir, DEFAULT_STORE))

    def _wait(self, step: int) -> Manifest:
        deadline, pause_s = time.monotonic() + self._timeout_s, FIRST_PAUSE_S
        first_status = read_status(self._run_dir)
        while (manifest := read_manifest(self._open_store(), step)) is None:
            status = read_status(self._run_dir)
            if status and status.ended and status.last_step < step:
                raise StopIteration
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Stalled(self._stall_reason(step, first_status, status))
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return manifest

    def _stall_reason(self, step: int, first_status: RunStatus | None, status: RunStatus | None) -> str:
        waited = f"no {self._open_store().location(manifest_key(step))} in {self._timeout_s:g} s"
        if status is None:
            return f"{waited}, and no orchestrator has written to {self._run_dir}: is it the directory of a run?"
        if status.last_step >= step:
            waited += (
                f", although step {status.last_step} is delivered: it was released (trainer.keep_manifests), or this "
                "host does not see it yet"
            )
        unchanged = " (unchanged since the wait began: is the orchestrator running?)" if status == first_status else ""
        return f"{waited}; the orchestrator reports: {status.why}{unchanged}"


class Batch:
    """One rank of a step, memory-mapped."""

    def __init__(self, store: Store, manifest: Manifest, data_rank: int) -> None:
        """Verify the checksum of the rank's file; experts files are verified when they are first read."""
        self.step = manifest.plan.step
        self.totals = manifest.totals
        self.plan = manifest.plan
        self._rollout_files = RolloutFiles(store, manifest.plan)
        ref = manifest.ranks[data_rank].file
        with _missing_explained(self.step):
            file = tensors.read(store, ref)
        if file.metadata != rank_metadata(self.step, data_rank):
            raise BlobCorrupt(f"blob {ref.key} is not rank {data_rank} of step {self.step}: {file.metadata}")
        self._arrays = file.arrays
        names = file.arrays.get(AGENTS, np.frombuffer(b"[]", np.uint8))
        self.agents: list[str] = json.loads(names.tobytes())
        """names of the agents that began this rank's samples; the main one's is empty"""

    def __len__(self) -> int:
        return self._arrays["max_seqlen"].size

    def micro_batches(self) -> "Iterator[MicroBatch]":
        """The micro-batches, the same on every call. Every rank of the step has the same number."""
        return (self._micro_batch(number) for number in range(len(self)))

    def _micro_batch(self, number: int) -> "MicroBatch":
        tokens, samples, segments = (slice(*self._arrays[name][number : number + 2].tolist()) for name in OFFSETS)
        return MicroBatch(
            **{name: self.column(name)[tokens] for name in TOKEN_COLUMNS},
            cu_seqlens=self._arrays["cu_seqlens"][segments],
            max_seqlen=int(self._arrays["max_seqlen"][number]),
            samples=SampleTable(**{name: self._sample_column(name)[samples] for name in SAMPLE_COLUMNS}),
            fields={
                **{name: array[tokens] for name, array in self._fields(TOKEN_FIELD)},
                **{name: array[samples] for name, array in self._fields(SAMPLE_FIELD)},
            },
            files=self._rollout_files,
        )

    def column(self, name: str) -> Array:
        """A column of all micro-batches, one after the other."""
        if name in ADDED_COLUMNS and name not in self._arrays:
            return np.full(self._arrays["input_ids"].shape, ADDED_COLUMNS[name], TOKEN_COLUMNS[name])
        return self._arrays[name]

    def _sample_column(self, name: str) -> Array:
        if name in ADDED_COLUMNS and SAMPLE + name not in self._arrays:
            return np.full(self._arrays[f"{SAMPLE}reward"].shape, ADDED_COLUMNS[name], SAMPLE_COLUMNS[name])
        return self._arrays[SAMPLE + name]

    def _fields(self, prefix: str) -> Iterator[tuple[str, Array]]:
        for name, array in self._arrays.items():
            if name.startswith(prefix):
                yield name.removeprefix(prefix), array


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Views of the rank's file: one entry per token, unless noted."""

    input_ids: Array
    position_ids: Array
    """positions that begin at 0 in every sample, and in the padding"""
    loss_mask: Array
    loss_weights: Array
    """0 outside the loss; sum(loss_weights * loss) over all ranks / `batch.totals.denominator` is the mean loss"""
    logprobs: Array
    """the logprob of each token at its own index, under the policy that sampled it; 0 on context"""
    advantages: Array
    temperatures: Array
    versions: Array
    """policy version of the weights that sampled the token; -1 on context"""
    version_exact: Array
    """0 where the version is the lower end of a range, or was not reported by the engine; 0 on
    context"""
    sampling: Array
    """0 where the token was drawn from the whole distribution, and on context; 1 from the tokens of `sampling_support`
    (top-k, top-p, min-p); 2 from a changed distribution that was not recorded"""
    cu_seqlens: Array
    """bounds of the segments, starting with 0; padding is the last segment"""
    max_seqlen: int
    samples: "SampleTable"
    fields: dict[str, Array]
    """the fields that `[batch.fields]` declares: one entry per token, or per sample in the order of `samples`"""
    files: "RolloutFiles"

    def sampling_support(self) -> "SamplingSupport":
        """The tokens that each token was drawn from, if `engine.sampling_masks` is set. Reads the
        rollouts' files."""
        lengths, ids = np.zeros(self.input_ids.size, np.int64), list[Array]()
        for sample, (start, stop) in enumerate(pairwise(self.cu_seqlens[: len(self.samples) + 1].tolist())):
            if not (self.sampling[start:stop] == RECORDED).any():
                continue
            columns = self.files.columns(int(self.samples.rollout_index[sample]))
            if columns.support_ids is None or columns.support_offsets is None:
                continue
            first = int(self.samples.rollout_offset[sample])
            offsets = columns.support_offsets[first : first + stop - start + 1]
            lengths[start:stop] = np.diff(offsets)
            ids.append(columns.support_ids[offsets[0] : offsets[-1]])
        joined = np.concatenate([np.empty(0, np.int32), *ids])
        return SamplingSupport(ids=joined, offsets=np.concatenate([[0], np.cumsum(lengths)]))

    def routed_experts(self, *, layers: Layers = slice(None), missing: Missing = -1) -> Array:
        """Expert ids [tokens, layers, topk]; `missing` where the engine sent none: -1 (signed dtype), 0, or "dummy",
        the valid ids 0, 1, ..., topk-1."""
        rows = self.files.new_rows(self.input_ids.size, layers, missing)
        for sample, segment, experts in self._segments():
            if experts:
                sample_index = int(self.samples.sample_in_rollout[sample])
                experts.read(
                    sample_index, 0, segment.stop - segment.start, rows[segment], layers=layers, missing=missing
                )
            else:
                rows[segment] = self.files.filling(missing)
        return rows

    def routed_valid(self) -> Array:
        """u8[tokens]: 1 where the engine sent routed experts."""
        valid = np.zeros(self.input_ids.size, np.uint8)
        for sample, segment, experts in self._segments():
            if experts:
                first = int(self.samples.rollout_offset[sample])
                valid[segment] = experts.routed_valid[first : first + segment.stop - segment.start]
        return valid

    def torch(self) -> dict[str, Any]:
        """Tensors of all columns, `cu_seqlens` and fields by name. Copies, because the file is mapped read-only."""
        try:
            torch: Any = import_module("torch")
        except ImportError as error:
            raise BatchError("torch is not installed here: install it, or use the NumPy arrays") from error
        columns = {name: getattr(self, name) for name in (*TOKEN_COLUMNS, "cu_seqlens")}
        return {name: torch.from_numpy(array.copy()) for name, array in {**columns, **self.fields}.items()}

    def _segments(self) -> Iterator[tuple[int, slice, Experts | None]]:
        """Number, slice and experts of each segment; padding has no experts."""
        for number, (start, stop) in enumerate(pairwise(self.cu_seqlens.tolist())):
            is_sample = number < self.samples.rollout_index.size
            experts = self.files.open_experts(int(self.samples.rollout_index[number])) if is_sample else None
            yield number, slice(start, stop), experts


@dataclass(frozen=True, kw_only=True)
class SamplingSupport:
    """The tokens that each token of a micro-batch was drawn from: `ids[offsets[t]:offsets[t + 1]]`; none on context,
    padding and where the engine sent none."""

    ids: Array
    offsets: Array


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """Arrays with one entry per sample of a micro-batch, in the order of its segments; padding has none."""

    rollout_index: Array
    """index in `batch.plan.rollouts`"""
    group_index: Array
    """index in `batch.plan.groups`"""
    env_index: Array
    """index in `batch.plan.envs`"""
    sample_in_rollout: Array
    rollout_offset: Array
    """position of its first token among all tokens of its rollout"""
    loss_tokens: Array
    rollout_loss_tokens: Array
    """loss tokens in all samples of its rollout, on all ranks"""
    truncated: Array
    version_first: Array
    version_last: Array
    reward: Array
    parent: Array
    """`sample_in_rollout` of the sample that it branches off or follows: a rolled back or compacted conversation, a
    sub-agent; -1 for none"""
    agent: Array
    """index in `batch.agents`; -1 where these are too many for the file"""

    def __len__(self) -> int:
        return len(self.reward)


class RowKind(NamedTuple):
    layers: int
    topk: int
    dtype: np.dtype[Any]


class RolloutFiles:
    """The files of a step's rollouts: experts, opened when they are first read, and columns."""

    def __init__(self, store: Store, plan: BatchPlan) -> None:
        self._store, self._rollouts, self._step = store, plan.rollouts, plan.step
        self._opened: dict[int, Experts] = {}

    def columns(self, rollout_index: int) -> Columns:
        """A rollout's own columns, verified; encoding has read them before."""
        with _missing_explained(self._step):
            return read_columns(self._store, self._rollouts[rollout_index].columns)

    @cached_property
    def kind(self) -> RowKind:
        """The form of the step's experts, the same on every rank, even if its own samples have
        none."""
        for rollout in self._rollouts:
            if rollout.experts:
                with _missing_explained(self._step):
                    return _kind(Experts(self._store, rollout.experts))
        raise BatchError(
            f"no rollout of step {self._step} has routed experts: for a mixture of experts, set engine.routed_experts "
            "and start the engine so that it returns them; for a dense model, do not ask for them"
        )

    def new_rows(self, tokens: int, layers: Layers, missing: Missing) -> Array:
        """An uninitialised array for the rows of `tokens` tokens."""
        count, topk, dtype = self.kind
        shape = (tokens, np.arange(count)[layers].size, topk)
        return np.empty(shape, SIGNED[dtype.itemsize] if missing == -1 else dtype)

    def filling(self, missing: Missing) -> Array:
        """The row of a token without experts."""
        return np.arange(self.kind.topk) if missing == "dummy" else np.array(missing)

    def open_experts(self, rollout_index: int) -> Experts | None:
        ref = self._rollouts[rollout_index].experts
        if ref is None:
            return None
        if rollout_index not in self._opened:
            with _missing_explained(self._step):
                experts = Experts(self._store, ref)
            if _kind(experts) != self.kind:
                raise BatchError(f"{ref.key} holds experts of {_kind(experts)}, other rollouts of {self.kind}")
            self._opened[rollout_index] = experts
        return self._opened[rollout_index]


@contextmanager
def _missing_explained(step: int) -> Iterator[None]:
    """Explain a missing blob: a trainer that reads a released step again nearly always lacks
    `resume_step`."""
    try:
        yield
    except BlobMissing as error:
        raise BlobMissing(
            f"{error}: step {step} was released, or the file is lost. A trainer that continues from a checkpoint opens "
            "BatchReader with resume_step = the step of that checkpoint; without it reading begins at step 0"
        ) from error


def _kind(experts: Experts) -> RowKind:
    _, layers, topk = experts.rows.shape
    return RowKind(layers, topk, experts.rows.dtype)
