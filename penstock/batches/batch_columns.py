"""The columns of a batch: their names, dtypes and what padding holds. Writer and reader share nothing else."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

RANK_FORMAT = "penstock.rank.1"
SAMPLE, EXTRA = "sample.", "extra."  # begin the names, in the file, of per-sample columns and of extras

TOKEN_COLUMNS = {
    "input_ids": np.dtype("i4"),
    "position_ids": np.dtype("i4"),
    "loss_mask": np.dtype("u1"),
    "loss_weights": np.dtype("f4"),
    "logprobs": np.dtype("f4"),
    "advantages": np.dtype("f4"),
    "temperatures": np.dtype("f4"),
    "versions": np.dtype("i4"),
}
PADDING = {"temperatures": 1, "versions": -1}  # everything else is 0, ids are the plan's pad_id

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
}

# One entry a micro-batch and one more, so that number m has [m] to [m + 1] of tokens, samples and cu_seqlens.
OFFSETS = ("token_offsets", "sample_offsets", "segment_offsets")


def rank_metadata(step: int, data_rank: int) -> dict[str, str]:
    return {"format": RANK_FORMAT, "step": str(step), "data_rank": str(data_rank)}


def token_columns(extras: tuple[str, ...]) -> dict[str, np.dtype[Any]]:
    return {**TOKEN_COLUMNS, **{EXTRA + name: np.dtype("f4") for name in extras}}
