"""Malformed responses are rejected with the right message, on the fast path and on the full one."""

import dataclasses

import pytest
from support.malformed_responses import LAYERS, PROMPT, TABLE, TOPK, Malformed, valid_response
from support.reference_comparison import agree, read_with
from support.strict_reference import ReadInputs

from headpond.errors import Upstream


def inputs(dialect: str, open_samples: list[tuple[list[int], int]] | None = None) -> ReadInputs:
    return ReadInputs(
        dialect=dialect,
        open_samples=open_samples or [],
        prompt=None if dialect == "vllm" else PROMPT,
        layers=LAYERS if dialect == "sglang" else None,
        topk=TOPK if dialect == "sglang" else None,
    )


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "generate"])
def test_the_originals_of_the_table_are_valid(dialect: str) -> None:
    form = "bare" if dialect == "sglang" else "object"
    assert agree(valid_response(dialect, form).body(), inputs(dialect)) is not None


@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"{case.dialect}: {case.name}")
def test_malformed_responses_are_rejected_with_their_message(case: Malformed) -> None:
    with pytest.raises(Upstream) as refusal:
        read_with(case.body, inputs(case.dialect))
    assert case.message in str(refusal.value)
    assert agree(case.body, inputs(case.dialect)) is None


@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"{case.dialect}: {case.name}")
def test_malformed_responses_are_rejected_if_the_prompt_matches_an_open_sample(case: Malformed) -> None:
    open_samples = inputs(case.dialect, [(PROMPT[:2], 0)])
    agree(case.body, dataclasses.replace(open_samples, topk=2, layers=2))


def test_the_table_has_no_duplicates() -> None:
    assert len({(case.dialect, case.name) for case in TABLE}) == len(TABLE) >= 60
    assert len({(case.dialect, case.body) for case in TABLE}) >= len(TABLE) - 4
