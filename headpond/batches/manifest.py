"""The format of a sealed step, shared by writer and reader: the columns of the ranks' files, and
the manifest.

Columns have names, dtypes and padding values. The manifest has the step's plan, the ranks' files,
and totals over all ranks. The orchestrator alone writes it, once, and never replaces it. A step is
sealed when its manifest exists; files that no manifest names belong to no batch.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headpond.batches import json_records
from headpond.batches.plan import BATCHES, BatchPlan, Normalise, step_directory
from headpond.errors import BatchError, BlobCorrupt, BlobMissing, OtherPlan, StageError
from headpond.fields import TrainerField
from headpond.store import BlobRef, Store

Array = NDArray[Any]

RANK_FORMAT = "headpond.rank.1"
# Prefixes in the file: per-sample columns, and the trainer's fields per token and per sample.
# Readers take the names and dtypes of the fields from the file alone.
SAMPLE, TOKEN_FIELD, SAMPLE_FIELD = "sample.", "extra.", "sample.extra."

TOKEN_COLUMNS = {
    "input_ids": np.dtype("i4"),
    "position_ids": np.dtype("i4"),
    "loss_mask": np.dtype("u1"),
    "loss_weights": np.dtype("f4"),
    "logprobs": np.dtype("f4"),
    "advantages": np.dtype("f4"),
    "temperatures": np.dtype("f4"),
    "versions": np.dtype("i4"),
    "version_exact": np.dtype("u1"),
    "sampling": np.dtype("u1"),
}
# `sampling` of a token. WHOLE: drawn from the whole distribution, or context. RECORDED: drawn
# from the tokens that the batch has for it. UNRECORDED: drawn from a changed distribution that
# nothing recorded.
WHOLE, RECORDED, UNRECORDED = 0, 1, 2
# Sampling parameters that leave out tokens; a sampling mask lists those that are left.
TRUNCATIONS = frozenset({"top_p", "top_k", "min_p"})
# Columns that files of earlier releases lack, and the values that readers use instead.
ADDED_COLUMNS = {"version_exact": 0, "sampling": 0, "parent": -1, "agent": -1}
PADDING = {"temperatures": 1, "versions": -1}  # other columns are padded with 0, input_ids with the plan's pad_id

SAMPLE_COLUMNS = {
    "rollout_index": np.dtype("i4"),
    "group_index": np.dtype("i4"),
    "env_index": np.dtype("i4"),
    "sample_in_rollout": np.dtype("i4"),
    "rollout_offset": np.dtype("i8"),
    "loss_tokens": np.dtype("i8"),
    "rollout_loss_tokens": np.dtype("i8"),
    "truncated": np.dtype("u1"),
    "version_first": np.dtype("i4"),
    "version_last": np.dtype("i4"),
    "reward": np.dtype("f4"),
    "parent": np.dtype("i4"),
    "agent": np.dtype("i4"),
}
# Names of the agents of a rank's samples: a JSON list, padded with spaces to AGENTS_BYTES.
AGENTS = "agents"
AGENTS_BYTES = 4096  # Room for about 128 names. Agents beyond have no name in the batch (-1).
AGENT_CHARACTERS = 24  # Names of agents are cut to this length.

# Names that `MicroBatch.torch` uses for its own tensors.
OWN_COLUMNS = frozenset({*TOKEN_COLUMNS, "cu_seqlens", "max_seqlen"})

# Micro-batch m has the tokens, samples and entries of cu_seqlens from offset [m] to [m + 1].
OFFSETS = ("token_offsets", "sample_offsets", "segment_offsets")

NAME = "manifest.json"
MANIFEST = re.compile(rf"{BATCHES}/step_(\d+)/{re.escape(NAME)}")


def rank_metadata(step: int, data_rank: int) -> dict[str, str]:
    return {"format": RANK_FORMAT, "step": str(step), "data_rank": str(data_rank)}


def token_columns(fields: Iterable[TrainerField]) -> dict[str, np.dtype[Any]]:
    return {
        **TOKEN_COLUMNS,
        **{TOKEN_FIELD + field.name: field.numpy_dtype for field in fields if field.per == "token"},
    }


def sample_columns(fields: Iterable[TrainerField]) -> dict[str, np.dtype[Any]]:
    return {
        **SAMPLE_COLUMNS,
        **{TOKEN_FIELD + field.name: field.numpy_dtype for field in fields if field.per == "sample"},
    }


@dataclass(frozen=True, kw_only=True)
class EncodedRank:
    """The result of an encoding job."""

    plan: str  # digest of the plan that was encoded
    data_rank: int
    file: BlobRef
    rollouts_jsonl: BlobRef | None = None
    micro_batches: int
    tokens: int  # tokens of the rank's samples, padding left out
    samples: int
    loss_tokens: int
    logprob_sum: float | None = None  # sum over the tokens in the loss; only in the native format


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over all ranks: with them a trainer normalises the loss without a collective operation."""

    loss_tokens: int
    samples: int
    rollouts: int
    groups: int
    tokens: int
    oversized: int  # samples longer than seq_len, handled by the plan's rule `oversize`
    # sum(loss_weights * loss) over all ranks divided by this is the mean that `normalise`
    # names
    denominator: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    format: Literal["headpond.batch.1"] = "headpond.batch.1"
    plan: BatchPlan
    totals: Totals
    ranks: tuple[EncodedRank, ...]
    # state of the estimator after this step, from which a lost ledger is rebuilt: JSON text
    estimator_state: str | None = None


def manifest_key(step: int) -> str:
    return f"{step_directory(step)}/{NAME}"


def seal_manifest(
    store: Store, plan: BatchPlan, ranks: Iterable[EncodedRank], *, estimator_state: str | None = None
) -> Manifest:
    """Create the manifest. Repeating the call changes nothing; another content is refused with BatchError."""
    manifest = _manifest(plan, sorted(ranks, key=lambda rank: rank.data_rank), estimator_state)
    key = manifest_key(plan.step)
    if not store.create(key, json_records.dumps(manifest)) and read_manifest(store, plan.step) != manifest:
        raise BatchError(
            f"step {plan.step} is sealed already, from another plan or other files: {store.location(key)} is not "
            "replaced"
        )
    return manifest


def read_manifest(store: Store, step: int) -> Manifest | None:
    """The manifest of a step; None if it is not sealed."""
    key = manifest_key(step)
    try:
        manifest = json_records.loads(Manifest, store.read(key))
    except BlobMissing:
        return None
    except ValueError as error:
        raise BlobCorrupt(f"{store.location(key)} is not a manifest: {error}; restore it from a backup") from error
    if manifest.plan.step != step:
        raise BlobCorrupt(f"{store.location(key)} is the manifest of step {manifest.plan.step}")
    return manifest


def manifest_steps(store: Store) -> list[int]:
    """Every sealed step, in order."""
    return sorted(int(match[1]) for key in store.keys(BATCHES) if (match := MANIFEST.fullmatch(key)))


def read_manifests(store: Store) -> dict[int, Manifest]:
    """Every sealed step -> its manifest, in order. A long run's manifests do not fit in memory: see
    `manifest_steps`."""
    return {step: manifest for step in manifest_steps(store) if (manifest := read_manifest(store, step))}


def _manifest(plan: BatchPlan, ranks: list[EncodedRank], estimator_state: str | None) -> Manifest:
    present, data_ranks = [rank.data_rank for rank in ranks], plan.rules.data_ranks
    if present != list(range(data_ranks)):
        raise StageError(f"step {plan.step} needs files of ranks 0 to {data_ranks - 1}, not of {present}")
    from_other_plans = [rank.file.key for rank in ranks if rank.plan != plan.digest]
    if from_other_plans:
        raise OtherPlan(f"it was encoded with other settings: {', '.join(from_other_plans)}")
    loss_tokens, samples = sum(rank.loss_tokens for rank in ranks), sum(rank.samples for rank in ranks)
    rollouts = len(plan.rollouts)
    totals = Totals(
        loss_tokens=loss_tokens,
        samples=samples,
        rollouts=rollouts,
        groups=len(plan.groups),
        tokens=sum(rank.tokens for rank in ranks),
        oversized=int((plan.lengths > plan.rules.seq_len).sum()),
        denominator=Normalise.parse(plan.normalise).denominator(
            loss_tokens=loss_tokens, samples=samples, rollouts=rollouts
        ),
    )
    return Manifest(plan=plan, totals=totals, ranks=tuple(ranks), estimator_state=estimator_state)
