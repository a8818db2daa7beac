"""Sampling masks in a response: for each completion token, the tokens that it was drawn from (top-k, top-p, min-p)."""

from itertools import chain

import msgspec
import numpy as np

from penstock.engines.dialects.base import ABSENT, TokenId, read_part
from penstock.errors import Upstream
from penstock.turn import Ids, SamplingMask

MASKS = msgspec.json.Decoder(list[list[TokenId]])


def read_sampling_mask(raw: msgspec.Raw, completion_ids: Ids) -> SamplingMask:
    """`Upstream` unless there is a set for every token, with the token in it."""
    if raw == ABSENT and not len(completion_ids):
        return SamplingMask.empty()
    if raw == ABSENT:
        raise Upstream(
            "the engine sent no sampling mask, and engine.sampling_masks is true: start vLLM with "
            "--return-sampling-mask, upgrade SGLang, or remove the setting"
        )
    sets = read_part(raw, MASKS, "the sampling mask")
    if len(sets) != len(completion_ids):
        raise Upstream(f"the engine's response has {len(sets)} sampling masks for {len(completion_ids)} tokens")
    lengths = np.fromiter(map(len, sets), np.int32, len(sets))
    ids = np.fromiter(chain.from_iterable(sets), np.int32, int(lengths.sum()))
    own = np.repeat(np.arange(len(sets)), lengths)[ids == np.repeat(completion_ids, lengths)]
    if len(np.unique(own)) != len(sets):
        raise Upstream("the engine's response has a sampling mask without the token that was sampled")
    return SamplingMask(ids=ids, lengths=lengths)
