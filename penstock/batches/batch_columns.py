"""The columns of a batch file, shared by writer and reader: names, dtypes and padding values."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.fields import TrainerField

Array = NDArray[Any]

RANK_FORMAT = "penstock.rank.1"
# Prefixes in the file: per-sample columns, and the trainer's fields per token and per sample. Readers learn the names
# and dtypes of the fields from the file alone.
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
WHOLE, RECORDED, UNRECORDED = 0, 1, 2
"""`sampling` of a token: drawn from the whole distribution (or context), from the tokens that the batch has for it, or
from a changed distribution that nothing recorded."""
TRUNCATIONS = frozenset({"top_p", "top_k", "min_p"})
"""Sampling parameters that leave out tokens; a sampling mask says which are left."""
ADDED_COLUMNS = {"version_exact": 0, "sampling": 0, "parent": -1, "agent": -1}
"""Columns that files of earlier releases do not have, and their values there."""
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
AGENTS = "agents"
"""Names of the agents of a rank's samples: a JSON list, padded with spaces to AGENTS_BYTES."""
AGENTS_BYTES = 4096
"""About 128 names. Agents beyond have no name in the batch (-1)."""
AGENT_CHARACTERS = 24
"""Names of agents are cut to this length."""

OWN_COLUMNS = frozenset({*TOKEN_COLUMNS, "cu_seqlens", "max_seqlen"})
"""What `MicroBatch.torch` returns under these names."""

# Micro-batch m has the tokens, samples and entries of cu_seqlens from offset [m] to [m + 1].
OFFSETS = ("token_offsets", "sample_offsets", "segment_offsets")


def rank_metadata(step: int, data_rank: int) -> dict[str, str]:
    return {"format": RANK_FORMAT, "step": str(step), "data_rank": str(data_rank)}


def token_columns(fields: Iterable[TrainerField]) -> dict[str, np.dtype[Any]]:
    return {**TOKEN_COLUMNS, **{TOKEN_FIELD + each.name: each.numpy_dtype for each in fields if each.per == "token"}}


def sample_columns(fields: Iterable[TrainerField]) -> dict[str, np.dtype[Any]]:
    return {**SAMPLE_COLUMNS, **{TOKEN_FIELD + each.name: each.numpy_dtype for each in fields if each.per == "sample"}}
