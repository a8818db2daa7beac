"""The plan of a step: its rollouts, their files and packing rules; and the packing of samples into
ranks and micro-batches.

The orchestrator composes plans from replies, without reading a token. Every encoding job of a step
reads the same plan. Plans of the same rollouts are equal, in any order of arrival. So is their
packing: a pure function of the lengths, in which ties go to the lower index.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from headpond.batches import json_records
from headpond.errors import ConfigError, StageError
from headpond.fields import TrainerField
from headpond.store import BlobRef

Format = Literal["native", "prime-rl", "prime-rl-2026-08"]
Oversize = Literal["cut", "mask", "drop", "fail"]
Ints = NDArray[np.int64]
BATCHES = "batches"  # folder of the store that holds a directory for each step
# The fields that prime-rl's formats have a place for, each per token and f32. The native format
# holds any field.
PRIME_RL_FIELDS = ("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")
FIRST_STEP = 0  # the batch of step s is trained into policy version s + 1


@dataclass(frozen=True, kw_only=True)
class PackingRules:
    data_ranks: int
    seq_len: int  # maximum tokens of a micro-batch, padding included
    pad_to_multiple_of: int = 1
    # samples longer than `seq_len` are cut, cut and masked, dropped, or fail the step
    oversize: Oversize = "mask"
    token_cost: float = 1.0
    # a rank's load is token_cost * sum(n) + attention_cost * sum(n^2) over its samples
    attention_cost: float = 0.0

    def __post_init__(self) -> None:
        if self.data_ranks < 1 or self.seq_len < 1 or self.pad_to_multiple_of < 1:
            raise ConfigError("data_ranks, seq_len and pad_to_multiple_of must be at least 1")
        if self.seq_len % self.pad_to_multiple_of:
            raise ConfigError(
                f"seq_len ({self.seq_len}) must be a multiple of pad_to_multiple_of ({self.pad_to_multiple_of}): "
                "otherwise padding makes a full micro-batch longer than seq_len"
            )
        if min(self.token_cost, self.attention_cost) < 0 or self.token_cost + self.attention_cost <= 0:
            raise ConfigError("token_cost and attention_cost must not be negative, and one of them above 0")
        object.__setattr__(self, "token_cost", float(self.token_cost))
        object.__setattr__(self, "attention_cost", float(self.attention_cost))


@dataclass(frozen=True, kw_only=True)
class Normalise:
    """The unit over which the loss is averaged: `token`, `sample`, `rollout`, or `constant:L` (each
    rollout's sum over L)."""

    unit: Literal["token", "sample", "rollout", "constant"]
    constant: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "Normalise":
        unit, _, constant = text.partition(":")
        if unit == "constant" and constant.replace(".", "", 1).isdigit() and float(constant) > 0:
            return cls(unit="constant", constant=float(constant))
        if constant or unit not in ("token", "sample", "rollout"):
            raise ConfigError(f'normalise = "{text}": use "token", "sample", "rollout" or "constant:L" with L above 0')
        return cls(unit=unit)

    def weight(self, *, loss_tokens: int, rollout_loss_tokens: int) -> float:
        """The weight of a loss token, given the loss tokens of its sample and of its rollout."""
        match self.unit:
            case "token":
                return 1.0
            case "sample":
                return 1.0 / max(1, loss_tokens)
            case "rollout":
                return 1.0 / max(1, rollout_loss_tokens)
            case "constant":
                return 1.0 / self.constant

    def denominator(self, *, loss_tokens: int, samples: int, rollouts: int) -> int:
        """The sum of weighted losses over all ranks divided by this is the mean. Never 0."""
        counts = {"token": loss_tokens, "sample": samples, "rollout": rollouts, "constant": rollouts}
        return max(1, counts[self.unit])


@dataclass(frozen=True, kw_only=True)
class BatchRollout:
    rollout: str
    group: str
    env: str
    reward: float
    advantage: float
    version_first: int  # lowest policy version that may have sampled one of its tokens
    version_last: int  # the highest one
    sample_lengths: tuple[int, ...]
    columns: BlobRef
    experts: BlobRef | None = None
    # delivered with loss mask 0; still counts in its group and in the denominator
    masked: bool = False
    # completion tokens whose version is a range, or was not reported by the engine
    inexact_tokens: int = 0
    # key of the file with the advantages of its turns; None if they all have `advantage`
    credit: str | None = None

    def __post_init__(self) -> None:
        for name in ("reward", "advantage"):
            number = float(getattr(self, name))  # 1 and 1.0 give the same digest
            if not isfinite(number):
                raise StageError(f"rollout {self.rollout} has {name} {number}: it cannot be in a batch")
            object.__setattr__(self, name, number)


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    step: int
    rules: PackingRules
    rollouts: tuple[BatchRollout, ...]
    normalise: str = "token"
    logprobs_mode: Literal["processed", "raw"] = "processed"
    extras: tuple[str, ...] = ()  # always empty: part of the format, and of the digest, since 0.2.0
    format: Format = "native"
    pad_id: int = 0
    fields: tuple[TrainerField, ...] = ()  # the trainer's fields, in order of their names
    # key of the file with the advantages of all rollouts' turns; it replaces those that the
    # rollouts name
    credit: str | None = None

    def __post_init__(self) -> None:
        Normalise.parse(self.normalise)
        in_order = tuple(sorted(self.rollouts, key=lambda rollout: rollout.rollout))
        for one, other in pairwise(in_order):
            if one.rollout == other.rollout:
                raise StageError(f"rollout {one.rollout} is twice in the plan of step {self.step}")
        object.__setattr__(self, "rollouts", in_order)
        object.__setattr__(self, "fields", tuple(sorted(self.fields, key=lambda field: field.name)))

    @cached_property
    def groups(self) -> tuple[str, ...]:
        return tuple(sorted({rollout.group for rollout in self.rollouts}))

    @cached_property
    def envs(self) -> tuple[str, ...]:
        return tuple(sorted({rollout.env for rollout in self.rollouts}))

    @cached_property
    def lengths(self) -> Ints:
        """Lengths of all samples, in the order of the rollouts."""
        return np.array([length for rollout in self.rollouts for length in rollout.sample_lengths], np.int64)

    @cached_property
    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(json_records.dumps(self))

    @property
    def directory(self) -> str:
        return step_directory(self.step)


def lost_by_format(batch_format: Format, normalise: str, fields: Iterable[TrainerField]) -> str | None:
    """The first setting that the format cannot hold, and its remedy; None if it holds everything."""
    if batch_format == "native":
        return None
    if normalise != "token":
        # prime-rl's rl_weights scale the loss of a token, but it always divides by the number of
        # tokens.
        return f'"{batch_format}" averages over tokens: set batch.normalise = "token", or use format = "native"'
    for field in fields:
        if field.name not in PRIME_RL_FIELDS or (field.per, field.dtype) != ("token", "f32"):
            return (
                f'"{batch_format}" cannot hold {field.setting} ({field.dtype} per {field.per}): it has '
                f'{", ".join(PRIME_RL_FIELDS)}, f32 per token; remove the field, or use format = "native"'
            )
    return None


def step_directory(step: int) -> str:
    """Directory of a step's files, as a key of the store."""
    return f"{BATCHES}/step_{step:06d}"


@dataclass(frozen=True, kw_only=True)
class Packing:
    # [rank][micro-batch] -> its samples; all ranks have the same number of micro-batches,
    # some are empty
    ranks: list[list[list[int]]]
    lengths: Ints  # delivered tokens of each sample; 0 if it is dropped
    oversized: NDArray[np.bool_]


def pack(lengths: Ints, rules: PackingRules) -> Packing:
    """Balance samples over ranks, heaviest first, then fill each rank's micro-batches by first-fit decreasing."""
    if lengths.size and lengths.min() < 1:
        raise StageError(f"sample {int(lengths.argmin())} of the batch has no tokens: it cannot be trained on")
    oversized = lengths > rules.seq_len
    if rules.oversize == "fail" and oversized.any():
        raise StageError(
            f"{int(oversized.sum())} samples are longer than seq_len ({rules.seq_len}), the longest has "
            f'{int(lengths.max())} tokens: raise seq_len, or set oversize to "cut", "mask" or "drop"'
        )
    delivered = np.where(oversized, 0 if rules.oversize == "drop" else rules.seq_len, lengths)
    ranks = [_micro_batches(samples, delivered, rules) for samples in _balance(delivered, rules)]
    count = max(map(len, ranks))
    for micro_batches in ranks:
        micro_batches.extend([] for _ in range(count - len(micro_batches)))
    return Packing(ranks=ranks, lengths=delivered, oversized=oversized)


def _costs(lengths: Ints, rules: PackingRules) -> NDArray[np.float64]:
    tokens = lengths.astype(np.float64)
    return rules.token_cost * tokens + rules.attention_cost * tokens**2


def _balance(lengths: Ints, rules: PackingRules) -> list[list[int]]:
    costs = _costs(lengths, rules)
    loads = [(0.0, rank) for rank in range(rules.data_ranks)]
    ranks: list[list[int]] = [[] for _ in loads]
    # A longer sample never costs less, so every rank receives its samples longest first.
    for sample in np.argsort(-lengths, kind="stable"):
        if lengths[sample]:
            load, rank = loads[0]
            ranks[rank].append(int(sample))
            heapq.heapreplace(loads, (load + float(costs[sample]), rank))
    return ranks


def _micro_batches(samples: list[int], lengths: Ints, rules: PackingRules) -> list[list[int]]:
    free = np.full(len(samples), rules.seq_len, np.int64)
    micro_batches: list[list[int]] = []
    for sample in samples:
        place = int(np.argmax(free >= lengths[sample]))
        if place == len(micro_batches):
            micro_batches.append([])
        micro_batches[place].append(sample)
        free[place] -= lengths[sample]
    # Ranks run in lockstep: with the heaviest first, the n-th micro-batches of all ranks take about equally long.
    return sorted(micro_batches, key=lambda batch: -float(_costs(lengths[batch], rules).sum()))


def segments(lengths: Sequence[int] | Ints, pad_to_multiple_of: int, *, min_tokens: int = 1) -> NDArray[np.int32]:
    """`cu_seqlens` of one micro-batch of at least `min_tokens` tokens: its samples, then padding as
    a segment of its own."""
    ends = np.cumsum(np.asarray(lengths, np.int64))
    tokens = int(ends[-1]) if ends.size else 0
    padded = -(-max(tokens, min_tokens) // pad_to_multiple_of) * pad_to_multiple_of
    return np.concatenate([[0], ends, [padded] if padded > tokens else []]).astype(np.int32)


def positions(cu_seqlens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Position of every token in its own segment."""
    starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    return np.arange(cu_seqlens[-1], dtype=np.int32) - starts
