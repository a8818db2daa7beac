"""Compares `read_turn` with the strict reference: both reject a response, or both read the same."""

import json
from collections.abc import Sequence

import numpy as np

from headpond.engines.dialects.base import without_routes
from headpond.engines.responses.response import read_turn
from headpond.errors import Upstream
from headpond.turn import CheckRoutes, Fingerprint, OpenSample, RouteFormat, Turn
from support import strict_reference as reference
from support.engine_responses import request_info


def read_with(body: bytes, inputs: reference.ReadInputs) -> Turn:
    return read_turn(
        body,
        open_samples=[
            OpenSample(sequence=fingerprint(ids), rows_from=rows_from) for ids, rows_from in inputs.open_samples
        ],
        request=request_info(
            inputs.dialect,
            prompt_ids=None if inputs.prompt is None else np.array(inputs.prompt, np.int32),
            routes_from=inputs.routes_from,
            max_seq_len=inputs.max_seq_len,
        ),
        route_format=RouteFormat(
            layers=inputs.layers,
            topk=inputs.topk,
            experts=inputs.experts,
            wire=inputs.wire,
            check=CheckRoutes.ALL,
        ),
    )


def fingerprint(ids: Sequence[int]) -> Fingerprint:
    return Fingerprint.of(np.array(ids, np.int32))


def reference_turn(turn: Turn) -> reference.ReferenceTurn:
    """A turn as the reference returns it."""
    rows = dict[int, list[list[int]]]()
    if turn.routes is not None:
        valid = np.ones(len(turn.routes.rows), np.bool_) if turn.routes.valid is None else turn.routes.valid
        rows = {turn.routes.first + at: turn.routes.rows[at].tolist() for at in np.flatnonzero(valid).tolist()}
    return reference.ReferenceTurn(
        extends=turn.extends,
        matches=turn.matches,
        prefix_tokens=turn.prefix_tokens,
        prompt=turn.prompt_ids.tolist(),
        completion=turn.completion_ids.tolist(),
        logprobs=turn.completion_logprobs.tolist(),
        untrained=[] if turn.completion_mask is None else np.flatnonzero(turn.completion_mask == 0).tolist(),
        rows=rows,
        finish_reason=turn.finish_reason,
        version=turn.version,
        spans=[(span.version, span.start, span.end) for span in turn.version_spans],
        message=None if turn.message is None else json.loads(turn.message),
        truncated=turn.truncated,
        overlong_prompt=turn.overlong_prompt,
    )


def agree(body: bytes, inputs: reference.ReadInputs) -> Turn | None:
    """The turn that both read; None if both reject."""
    try:
        expected = reference.read(body, inputs)
    except reference.Rejected as rejection:
        expected = rejection
    try:
        turn = read_with(body, inputs)
    except Upstream as error:
        turn = error
    if isinstance(turn, Upstream) or isinstance(expected, reference.Rejected):
        assert isinstance(turn, Upstream), f"read, but the reference rejects it: {expected!r}: {body[:2000]}"
        assert isinstance(expected, reference.Rejected), f"{turn!r}, but the reference reads it: {body[:2000]}"
        return None
    assert reference_turn(turn) == expected, body[:2000]
    check_sequence_and_span(body, inputs, turn)
    return turn


def check_sequence_and_span(body: bytes, inputs: reference.ReadInputs, turn: Turn) -> None:
    """Check what the reference does not return: the fingerprint, and the body without routes."""
    held = inputs.open_samples[turn.extends][0] if turn.extends is not None else []
    sequence = [*held, *turn.prompt_ids.tolist(), *turn.completion_ids.tolist()]
    assert turn.tokens == turn.sequence.tokens == len(sequence)
    assert turn.sequence.text_digest == fingerprint(sequence).text_digest
    assert turn.sequence.ids_digest == fingerprint(sequence).ids_digest
    for_client = without_routes(body, turn)
    choice = json.loads(for_client)["choices"][0]
    assert choice.get("routed_experts") is None or (choice.get("meta_info") or {}).get("routed_experts") is None
    if turn.routes_span is None:
        assert for_client == body
    else:
        start, end = turn.routes_span
        assert for_client == body[:start] + b"null" + body[end:]
