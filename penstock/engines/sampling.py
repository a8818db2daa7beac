"""Sampling that bends the distribution: ratios to what the trainer computes are then ill-defined, so it is recorded."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import orjson

logger = logging.getLogger("penstock.engines")

# With the values that bend nothing.
NEUTRAL = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}


def bent_sampling(sampling: Mapping[str, Any]) -> str:
    """The fields that bend, as JSON; warned about once."""
    bent = {
        name: value
        for name, neutral in NEUTRAL.items()
        if (value := sampling.get(name)) is not None and value not in neutral
    }
    if bent:
        warn_once(", ".join(sorted(bent)))
    return orjson.dumps(bent, option=orjson.OPT_SORT_KEYS).decode()


@functools.cache
def warn_once(names: str) -> None:
    logger.warning(
        "action=bent_sampling fields=%s: the trainer's probabilities are of another distribution; ratios are off", names
    )
