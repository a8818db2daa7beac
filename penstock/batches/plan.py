"""What a step is made of: its rollouts, their files, and the rules by which they are packed.

Composed by the orchestrator from replies, without reading a token; every encoding job of the step reads the same plan.
Plans of the same rollouts are equal, in any order of arrival.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import Literal

import numpy as np
import xxhash

from penstock.batches import json_records
from penstock.batches.packing import Ints, Normalise, PackingRules
from penstock.errors import StageError
from penstock.fields import TrainerField
from penstock.store import BlobRef

Format = Literal["native", "prime-rl", "prime-rl-2026-08", "prime-rl-2026-05"]
BATCHES = "batches"  # folder of the store that holds a directory for each step
MICRO_BATCH_FIELDS = ("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")
PRIME_RL_FIELDS: dict[str, tuple[str, ...]] = {
    "prime-rl": MICRO_BATCH_FIELDS,
    "prime-rl-2026-08": MICRO_BATCH_FIELDS,
    "prime-rl-2026-05": ("ref_logprobs",),  # its teacher_logprobs
}
"""The fields that a format of prime-rl has a place for, each per token and f32. The native format holds any."""
FIRST_STEP = 0  # the batch of step s is trained into policy version s + 1


@dataclass(frozen=True, kw_only=True)
class BatchRollout:
    rollout: str
    group: str
    env: str
    reward: float
    advantage: float
    version_first: int
    """lowest policy version that may have sampled one of its tokens"""
    version_last: int
    """the highest one"""
    sample_lengths: tuple[int, ...]
    columns: BlobRef
    experts: BlobRef | None = None
    masked: bool = False
    """delivered with loss mask 0; still counts in its group and in the denominator"""
    inexact_tokens: int = 0
    """completion tokens whose version is a range, or was not said by the engine"""
    credit: str | None = None
    """key of the file with the advantages of its turns; None if they all have `advantage`"""

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
    extras: tuple[str, ...] = ()
    """only in manifests of release 0.1: names of per-token f32 fields"""
    format: Format = "native"
    pad_id: int = 0
    fields: tuple[TrainerField, ...] = ()
    """for the trainer, in order of their names"""
    credit: str | None = None
    """key of the file with the advantages of all rollouts' turns, instead of those that the rollouts name"""

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
    def files(self) -> int:
        """Number of encoding jobs: one per data rank, one in all for formats without ranks."""
        return files_of(self.format, self.rules.data_ranks)

    @property
    def directory(self) -> str:
        return step_directory(self.step)


def lost_by_format(batch_format: Format, normalise: str, fields: Iterable[TrainerField]) -> str | None:
    """What the format cannot hold, and what to change; None if it holds everything."""
    if batch_format == "native":
        return None
    if normalise != "token":
        # Its rl_weights scale the loss of a token, but it always divides by the number of tokens.
        return f'"{batch_format}" averages over tokens: set batch.normalise = "token", or use format = "native"'
    held = PRIME_RL_FIELDS[batch_format]
    for each in fields:
        if each.name not in held or (each.per, each.dtype) != ("token", "f32"):
            return (
                f'"{batch_format}" cannot hold {each.setting} ({each.dtype} per {each.per}): it has {", ".join(held)}, '
                'f32 per token; remove the field, or use format = "native"'
            )
    return None


def files_of(batch_format: str, data_ranks: int) -> int:
    return 1 if batch_format == "prime-rl-2026-05" else data_ranks


def step_directory(step: int) -> str:
    """Directory of a step's files, as a key of the store."""
    return f"{BATCHES}/step_{step:06d}"
