"""Inputs of the filters, with defaults for everything a test does not set."""

import numpy as np

from headpond.filters import GroupRewards, RolloutTokens


def rollout(
    logprobs: list[float],
    *,
    input_ids: list[int] | None = None,
    loss_mask: list[int] | None = None,
    sample_offsets: list[int] | None = None,
    truncated: list[int] | None = None,
    overlong_prompt: list[int] | None = None,
    versions: tuple[int, int] = (0, 0),
) -> RolloutTokens:
    offsets = [0, len(logprobs)] if sample_offsets is None else sample_offsets
    samples = len(offsets) - 1
    return RolloutTokens(
        input_ids=np.array([7] * len(logprobs) if input_ids is None else input_ids, np.int32),
        loss_mask=np.array([1] * len(logprobs) if loss_mask is None else loss_mask, np.uint8),
        logprobs=np.array(logprobs, np.float32),
        sample_offsets=np.array(offsets, np.int64),
        truncated=np.array([0] * samples if truncated is None else truncated, np.uint8),
        overlong_prompt=np.array([0] * samples if overlong_prompt is None else overlong_prompt, np.uint8),
        version_first=versions[0],
        version_now=versions[1],
    )


def group(rewards: list[float], shaped: list[float] | None = None) -> GroupRewards:
    return GroupRewards(rewards=np.array(rewards), shaped=np.array(rewards if shaped is None else shaped))
