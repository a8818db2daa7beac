"""Sampling parameters that change the distribution. They are recorded with each turn.

The trainer computes probabilities of the unchanged distribution, so importance ratios of such turns
are off.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import orjson

logger = logging.getLogger("headpond.engines")

NEUTRAL = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}
"""Each parameter with the values that leave the distribution unchanged."""


def altered_sampling(sampling: Mapping[str, Any]) -> str:
    """The parameters that change the distribution, as JSON. Each combination is logged once."""
    altered = altered_parameters(sampling)
    if altered:
        warn_once(", ".join(sorted(altered)))
    return orjson.dumps(altered, option=orjson.OPT_SORT_KEYS).decode()


def altered_parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, neutral in NEUTRAL.items()
        if (value := sampling.get(name)) is not None and value not in neutral
    }


@functools.cache
def warn_once(names: str) -> None:
    logger.warning(
        "action=altered_sampling fields=%s: the trainer's probabilities are of another distribution; ratios are off",
        names,
    )
