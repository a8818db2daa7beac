"""Turns made of token ids, without a response body."""

from collections.abc import Sequence

from headpond.engines.cuts import longest_in_ids
from headpond.turn import Fingerprint, Ids, Logprobs, OpenSample, Routes, Turn, VersionSpan


def turn_of_ids(
    prompt_ids: Ids,
    completion_ids: Ids,
    completion_logprobs: Logprobs,
    *,
    open_samples: Sequence[OpenSample] = (),
    routes: Routes | None = None,
    max_seq_len: int | None = None,
    finish_reason: str | None = None,
    spans: Sequence[tuple[int, int, int]] = (),
    ended: int | None = None,
) -> Turn:
    """The turn of a response with these tokens. `routes` may include rows that the sample has already."""
    match = longest_in_ids(prompt_ids, [sample.sequence for sample in open_samples])
    before = open_samples[match.index].sequence if match else Fingerprint()
    tokens = len(prompt_ids) + len(completion_ids)
    limit = tokens if max_seq_len is None else max_seq_len
    kept_prompt = prompt_ids[before.tokens : limit]
    kept_completion = completion_ids[: max(0, limit - len(prompt_ids))]
    return Turn(
        extends=match.index if match else None,
        matches=match.matches if match else 0,
        prefix_tokens=before.tokens,
        prompt_ids=kept_prompt,
        completion_ids=kept_completion,
        completion_logprobs=completion_logprobs[: len(kept_completion)],
        routes=routes,
        sequence=before.extended(kept_prompt, kept_completion),
        finish_reason=finish_reason,
        version=ended,
        version_spans=tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in spans),
        message=None,
        truncated=tokens > limit,
        overlong_prompt=len(prompt_ids) > limit,
    )
