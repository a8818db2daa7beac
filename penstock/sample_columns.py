"""Samples -> the columns of a rollout's file: every token of every sample, one sample after the other."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.blobs.columns import Columns, TurnTable
from penstock.samples import Addition, Mask, Samples

Offsets = NDArray[np.int64]


def columns_of(
    samples: Samples,
    *,
    rollout: str,
    attempt: int,
    logprobs_mode: str,
    error: str = "",
    extras: Mapping[str, NDArray[np.float32]] | None = None,
    conversation: bytes = b"",
) -> Columns:
    """Context has loss mask 0 and logprob 0; of a rollout that ended in an error nothing is trained on."""
    offsets = _offsets(samples)
    input_ids, logprobs = np.empty(offsets[-1], np.int32), np.zeros(offsets[-1], np.float32)
    loss_mask = np.zeros(offsets[-1], np.uint8)
    by_sample: list[list[Addition]] = [[] for _ in offsets[1:]]
    for turn in samples.turns:
        by_sample[turn.sample].append(turn)
        begin, start, end = (offsets[turn.sample] + at for at in (turn.prefix_tokens, turn.start, turn.end))
        input_ids[begin:start], input_ids[start:end] = turn.prompt_ids, turn.completion_ids
        logprobs[start:end] = turn.completion_logprobs
        if not error:
            loss_mask[start:end] = 1 if turn.completion_mask is None else turn.completion_mask
    return Columns(
        rollout=rollout,
        attempt=attempt,
        logprobs_mode=logprobs_mode,
        error=error,
        input_ids=input_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        sample_offsets=offsets,
        first_prompt_length=np.array([turns[0].start for turns in by_sample], np.int32),
        truncated=np.array([any(turn.truncated for turn in turns) for turns in by_sample], np.uint8),
        overlong_prompt=np.array([any(turn.overlong_prompt for turn in turns) for turns in by_sample], np.uint8),
        turns=_turn_table(samples.turns, offsets),
        metrics=samples.metrics(),
        extras=extras or {},
        conversation=np.frombuffer(conversation, np.uint8),
    )


def routed_valid_of(samples: Samples) -> Mask:
    """For each token, whether its routed row was sent."""
    offsets = _offsets(samples)
    valid = np.zeros(offsets[-1], np.uint8)
    for chunk in samples.chunks():
        first = offsets[chunk.sample] + chunk.first
        valid[first : first + chunk.rows] = 1
    return valid


def _offsets(samples: Samples) -> Offsets:
    return np.cumsum([0, *samples.lengths()], dtype=np.int64)


def _turn_table(turns: Sequence[Addition], offsets: Offsets) -> TurnTable:
    sample = np.array([turn.sample for turn in turns], np.int32)
    named = {
        "finish_reason": [turn.finish_reason for turn in turns],
        "agent": [turn.agent for turn in turns],
        "engine": [turn.engine for turn in turns],
        "sampling": [turn.sampling for turn in turns],
    }
    words = {name: list(dict.fromkeys(values)) for name, values in named.items()}
    numbers = {
        name: np.array([words[name].index(value) for value in values], np.int32) for name, values in named.items()
    }
    return TurnTable(
        sample=sample,
        start=offsets[sample] + np.array([turn.start for turn in turns], np.int64),
        end=offsets[sample] + np.array([turn.end for turn in turns], np.int64),
        version_first=np.array([turn.version_first for turn in turns], np.int32),
        version_last=np.array([turn.version_last for turn in turns], np.int32),
        temperature=np.array([turn.temperature for turn in turns], np.float32),
        **numbers,
        words=words,
    )
