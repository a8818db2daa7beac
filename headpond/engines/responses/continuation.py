"""Continuation of a completion that the engine aborted. Its tokens end the next prompt; the answers
become one turn.

This needs an engine that takes tokens, and sampling parameters that act on each token alone. A
penalty or a grammar would start anew in the middle of the completion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from headpond.engines.dialects.base import NEUTRAL, Prompt
from headpond.errors import Upstream
from headpond.turn import Ids, OpenSample, Routes, Turn, VersionSpan

# Limit for one completion. An engine that aborts more often spends its time on prefills: it
# should pause otherwise.
MAX_CONTINUATIONS = 8
LIMITS = ("max_tokens", "max_completion_tokens")
# Sampling fields that act on each token alone. Stop strings do not: one may lie across the abort.
TOKENWISE = frozenset(
    {
        *LIMITS,
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "logit_bias",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "top_logprobs",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_reasoning",
        "separate_reasoning",
        "priority",
        "user",
    }
)


def can_continue(prompt: Prompt, sampling: Mapping[str, Any]) -> bool:
    if prompt.ids is None or any(_is_strict(tool) for tool in prompt.tools or ()):
        return False
    return all(
        value is None or name in TOKENWISE or (name in NEUTRAL and value in NEUTRAL[name])
        for name, value in sampling.items()
    )


def _is_strict(tool: Mapping[str, Any]) -> bool:
    """A strict function makes SGLang decode by a grammar."""
    function = tool.get("function")
    return isinstance(function, Mapping) and bool(function.get("strict"))


def remaining(sampling: Mapping[str, Any], generated: int) -> dict[str, Any] | None:
    """The sampling parameters for the rest of a completion; None if its limit of tokens is used up."""
    limits = {name: sampling[name] - generated for name in LIMITS if sampling.get(name) is not None}
    return None if any(limit < 1 for limit in limits.values()) else {**sampling, **limits}


def continued_prompt(prompt: Prompt, turn: Turn, sample: OpenSample) -> Prompt:
    """The prompt whose completion continues `turn`, an aborted answer to `prompt`.

    The last token's row is always requested: vLLM 0.28 fails if the start lies behind the prompt.
    """
    assert prompt.ids is not None
    ids: Ids = np.concatenate([prompt.ids, turn.completion_ids])
    return replace(prompt, ids=ids, routes_from=min(sample.rows_from, len(ids) - 1))


def open_sample_of(turn: Turn, open_samples: Sequence[OpenSample]) -> OpenSample:
    """The aborted turn as an open sample for `read_turn`. `rows_from` is the first row that the
    turn lacks: vLLM sends none."""
    if turn.routes is not None:
        rows_from = turn.routes.first + len(turn.routes.rows)
    else:
        rows_from = 0 if turn.extends is None else open_samples[turn.extends].rows_from
    return OpenSample(sequence=turn.sequence, rows_from=rows_from)


def joined(first: Turn, continuation: Turn) -> Turn:
    """One turn, joined from an aborted one and its continuation. It has no message: the renderer
    makes it from the tokens."""
    if continuation.extends is None or len(continuation.prompt_ids):
        raise Upstream("the engine's response to a continued completion has another prompt than was sent")
    return structs.replace(
        continuation,
        extends=first.extends,
        matches=first.matches,
        prefix_tokens=first.prefix_tokens,
        prompt_ids=first.prompt_ids,
        completion_ids=np.concatenate([first.completion_ids, continuation.completion_ids]),
        completion_logprobs=np.concatenate([first.completion_logprobs, continuation.completion_logprobs]),
        completion_mask=_joined_masks(first, continuation),
        unknown_logprobs=first.unknown_logprobs + continuation.unknown_logprobs,
        routes=_joined_routes(first.routes, continuation.routes),
        routes_span=None,
        sampling_mask=first.sampling_mask.followed_by(continuation.sampling_mask)
        if first.sampling_mask and continuation.sampling_mask
        else None,
        version_spans=_joined_spans(first, continuation),
        message=None,
        overlong_prompt=first.overlong_prompt,
        fields=_joined_fields(first, continuation),
    )


def _joined_masks(first: Turn, continuation: Turn) -> NDArray[np.uint8] | None:
    if first.completion_mask is None and continuation.completion_mask is None:
        return None
    masks = [
        np.ones(len(turn.completion_ids), np.uint8) if turn.completion_mask is None else turn.completion_mask
        for turn in (first, continuation)
    ]
    return np.concatenate(masks)


def _joined_spans(first: Turn, continuation: Turn) -> tuple[VersionSpan, ...]:
    """The spans of both parts. Empty if a part with tokens states no versions."""
    done = len(first.completion_ids)
    if not done or not len(continuation.completion_ids):
        return continuation.version_spans or first.version_spans
    if not first.version_spans or not continuation.version_spans:
        return ()
    shifted = [replace(span, start=span.start + done, end=span.end + done) for span in continuation.version_spans]
    return (*first.version_spans, *shifted)


def _joined_routes(first: Routes | None, continuation: Routes | None) -> Routes | None:
    if first is None or continuation is None:
        return first or continuation
    valid = None
    if first.valid is not None or continuation.valid is not None:
        valid = np.concatenate(
            [np.ones(len(part.rows), np.bool_) if part.valid is None else part.valid for part in (first, continuation)]
        )
    return structs.replace(
        continuation, first=first.first, rows=np.concatenate([first.rows, continuation.rows]), valid=valid
    )


def _joined_fields(first: Turn, continuation: Turn) -> dict[str, NDArray[Any]]:
    """The fields of both parts. A field with a number per token needs both. For one number per
    turn, the last one is kept."""
    fields: dict[str, NDArray[Any]] = {}
    for name, values in continuation.fields.items():
        if not values.ndim:
            fields[name] = values
        elif (first_values := first.fields.get(name)) is not None or not len(first.completion_ids):
            fields[name] = values if first_values is None else np.concatenate([first_values, values])
    return fields
