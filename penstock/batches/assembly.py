"""A plan's samples and micro-batches as arrays, from the rollouts' `columns` files: what every format is written from.

Holds a few opened rollouts and one micro-batch, however large the batch is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from penstock.batches.batch_columns import EXTRA, PADDING, Array, token_columns
from penstock.batches.plan import BatchPlan, BatchRollout
from penstock.errors import StageError
from penstock.packing import Normalise, pack, positions, segments
from penstock.store import Store
from penstock.store.columns import Columns, read_columns

OPEN_ROLLOUTS = 16  # memory maps kept for the next sample of the same rollout; most rollouts have one sample


@dataclass(frozen=True, kw_only=True)
class Sample:
    rollout: BatchRollout
    tokens: dict[str, Array]
    """by the names of the batch's columns, without position_ids"""
    row: dict[str, int | float]
    """by the names of the per-sample columns"""
    prompt_length: int
    """tokens of the first turn's prompt"""

    @property
    def length(self) -> int:
        return self.tokens["input_ids"].size


@dataclass(frozen=True, kw_only=True)
class AssembledMicroBatch:
    tokens: dict[str, Array]
    cu_seqlens: Array
    samples: list[Sample]


class Assembly:
    def __init__(self, store: Store, plan: BatchPlan) -> None:
        self.store, self.plan = store, plan
        self.packing = pack(plan.lengths, plan.rules)
        counts = [len(rollout.sample_lengths) for rollout in plan.rollouts]
        self._first_sample = np.cumsum([0, *counts])
        self._rollout_of = np.repeat(np.arange(len(counts)), counts)
        self._group_index = {group: index for index, group in enumerate(plan.groups)}
        self._env_index = {env: index for index, env in enumerate(plan.envs)}
        self._normalise = Normalise.parse(plan.normalise)
        self._columns = lru_cache(maxsize=OPEN_ROLLOUTS)(self._open)

    def sample(self, number: int) -> Sample:
        """A sample of the plan, by its place in `plan.lengths`, cut and masked as the plan says."""
        index = int(self._rollout_of[number])
        planned, inside = self.plan.rollouts[index], number - int(self._first_sample[index])
        columns, counts = self._columns(index)
        loss_tokens, rollout_loss_tokens = int(counts[inside]), int(counts.sum())
        start, length = columns.sample(inside).start, int(self.packing.lengths[number])
        where = slice(start, start + length)
        loss_mask = columns.loss_mask[where] * np.uint8(self._trains(index, number))
        weight = self._normalise.weight(loss_tokens=loss_tokens, rollout_loss_tokens=rollout_loss_tokens)
        from_turns, versions = _turns(columns, inside, length)
        tokens = {
            "input_ids": columns.input_ids[where],
            "loss_mask": loss_mask,
            "loss_weights": loss_mask * np.float32(weight),
            "logprobs": columns.logprobs[where],
            "advantages": np.full(length, planned.advantage, np.float32),
            **{EXTRA + name: _extra(columns, name)[where] for name in self.plan.extras},
        }
        row = {
            "rollout_index": index,
            "group_index": self._group_index[planned.group],
            "env_index": self._env_index[planned.env],
            "sample_in_rollout": inside,
            "rollout_offset": start,
            "loss_tokens": loss_tokens,
            "rollout_loss_tokens": rollout_loss_tokens,
            "truncated": int(columns.truncated[inside] or length < planned.sample_lengths[inside]),
            "reward": planned.reward,
        }
        prompt_length = min(length, int(columns.first_prompt_length[inside]))
        return Sample(rollout=planned, tokens=tokens | from_turns, row=row | versions, prompt_length=prompt_length)

    def micro_batch(self, numbers: Sequence[int], *, pad_id: int) -> AssembledMicroBatch:
        samples = [self.sample(number) for number in numbers]
        cu_seqlens = segments([sample.length for sample in samples], self.plan.rules.pad_to_multiple_of)
        padding = {**PADDING, "input_ids": pad_id}
        tokens = {
            name: np.full(cu_seqlens[-1], padding.get(name, 0), dtype)
            for name, dtype in token_columns(self.plan.extras).items()
        }
        tokens["position_ids"] = positions(cu_seqlens)
        for sample, start in zip(samples, cu_seqlens.tolist(), strict=False):
            for name, values in sample.tokens.items():
                tokens[name][start : start + sample.length] = values
        return AssembledMicroBatch(tokens=tokens, cu_seqlens=cu_seqlens, samples=samples)

    def _trains(self, rollout: int, number: int) -> bool:
        masked = self.plan.rules.oversize == "mask" and self.packing.oversized[number]
        return not (masked or self.plan.rollouts[rollout].masked)

    def _open(self, index: int) -> tuple[Columns, Array]:
        """The rollout's columns, and how many tokens of each of its samples are in the loss."""
        planned, plan = self.plan.rollouts[index], self.plan
        columns = read_columns(self.store, planned.columns)
        lengths = tuple(np.diff(columns.sample_offsets).tolist())
        if lengths != planned.sample_lengths:
            raise StageError(
                f"{planned.columns.key}: samples of {lengths} tokens, the plan has {planned.sample_lengths}"
            )
        if columns.logprobs_mode != plan.logprobs_mode:
            raise StageError(
                f"{planned.columns.key}: {columns.logprobs_mode} logprobs, the plan's are {plan.logprobs_mode}"
            )
        if unplanned := columns.extras.keys() - set(plan.extras):
            raise StageError(f"{planned.columns.key}: the plan does not name its columns {sorted(unplanned)}")
        loss_tokens = np.zeros(len(lengths), np.int64)
        for inside, start in enumerate(columns.sample_offsets[:-1].tolist()):
            number = int(self._first_sample[index]) + inside
            if self._trains(index, number):
                loss_tokens[inside] = np.count_nonzero(columns.loss_mask[start : start + self.packing.lengths[number]])
        return columns, loss_tokens


def _extra(columns: Columns, name: str) -> Array:
    return columns.extras.get(name, np.broadcast_to(np.float32(np.nan), columns.input_ids.shape))


def _turns(columns: Columns, sample: int, length: int) -> tuple[dict[str, Array], dict[str, int | float]]:
    """Temperature and version of each of a sample's first `length` tokens; its first and last version."""
    turns, where = columns.turns, columns.sample(sample)
    own = np.flatnonzero(turns.sample == sample)
    # A turn adds context, which nobody sampled, and then its completion: two runs of tokens.
    edges = np.stack([turns.start[own], turns.end[own]], axis=1).ravel()
    runs = np.diff(edges, prepend=where.start)
    if not own.size or edges[-1] != where.stop or (runs < 0).any():
        raise StageError(f"the turns of sample {sample} of rollout {columns.rollout} do not cover its tokens")
    versions = np.stack([np.full(own.size, -1, np.int32), turns.version_first[own]], axis=1).ravel()
    tokens = {
        "temperatures": np.repeat(np.repeat(turns.temperature[own], 2), runs)[:length],
        "versions": np.repeat(versions, runs)[:length],
    }
    row = {"version_first": int(turns.version_first[own[0]]), "version_last": int(turns.version_last[own[-1]])}
    return tokens, dict[str, int | float](row)
