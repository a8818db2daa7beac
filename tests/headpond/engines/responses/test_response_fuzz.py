"""Thousands of mutated bodies: each is rejected or read as by the strict reference."""

import base64
import random
from dataclasses import dataclass

import numpy as np
import pytest
from support.engine_responses import DIALECTS, FORMS, ResponseSpec
from support.malformed_responses import mutated, scrambled
from support.reference_comparison import agree, read_with, reference_turn
from support.strict_reference import ReadInputs

BODIES_A_ROUND = 100
PROMPT, COMPLETION = [5, 70, 800, 9000, 10_000, 5, 5, 70], [31, 32, 33, 34]
TOKENS = len(PROMPT) + len(COMPLETION)


@dataclass(frozen=True)
class Start:
    """A valid response to mutate, and the open samples that it is read with."""

    spec: ResponseSpec
    inputs: ReadInputs

    def held(self, body: bytes) -> tuple[int, int]:
        """Span of the base64 of recorded rows in the compact body."""
        rows = self.spec.rows
        rows_from = max((rows_from for _, rows_from in self.inputs.open_samples), default=0)
        if rows is None or not rows_from:
            return 0, 0
        choice = self.spec.as_dict()["choices"][0]
        payload = choice.get("routed_experts") or choice["meta_info"]["routed_experts"]
        text = payload["data"] if isinstance(payload, dict) else payload
        row_bytes = rows[0].size * (4 if self.spec.form == "bare" else rows.itemsize)
        header_bytes = len(base64.b64decode(text)) - len(rows) * row_bytes
        at = body.index(text.encode())
        return at + (header_bytes + 2) // 3 * 4, at + (header_bytes + rows_from * row_bytes) // 3 * 4


def starts() -> list[Start]:
    rng = np.random.default_rng(1)
    collected = list[Start]()
    for dialect in DIALECTS:
        for form in [*FORMS, None]:
            for open_samples, format_known in [
                ([], False),
                ([(PROMPT[:5], 4)], True),
                ([(PROMPT[:3], 2), (PROMPT, 8), ([1, 2], 1)], True),
            ]:
                dtype = rng.choice(["uint8", "uint16", "int32"]) if form in ("object", "npy") else "int32"
                rows = None if form is None else rng.integers(0, 9, (TOKENS - 1, 2, 2)).astype(dtype)
                collected.append(
                    Start(
                        ResponseSpec(
                            prompt=PROMPT,
                            completion=COMPLETION,
                            rows=rows,
                            dialect=dialect,
                            form=form or "",
                            named_by_id=format_known,
                        ),
                        ReadInputs(
                            dialect=dialect,
                            open_samples=open_samples,
                            prompt=None if dialect == "vllm" else PROMPT,
                            layers=2 if form == "bare" or format_known else None,
                            topk=2 if form == "bare" or format_known else None,
                            wire=str(dtype) if format_known else None,
                            experts=9 if rng.random() < 0.5 else None,
                        ),
                    )
                )
    return collected


STARTS = starts()


def test_every_start_is_a_valid_response() -> None:
    for start in STARTS:
        turn = agree(start.spec.body(), start.inputs)
        assert turn is not None
        assert (turn.routes is None) == (start.spec.rows is None)


def test_mutated_structures_are_read_as_by_the_reference(fuzz_rounds: int) -> None:
    accepted = 0
    for number in range(fuzz_rounds):
        rng = random.Random(number)
        for _ in range(BODIES_A_ROUND):
            start = rng.choice(STARTS)
            accepted += agree(mutated(start.spec.as_dict(), rng), start.inputs) is not None
    assert 0.2 < accepted / (fuzz_rounds * BODIES_A_ROUND) < 0.8, "the mutations are too strong or too weak"


def test_mutated_bytes_are_read_as_by_the_reference(fuzz_rounds: int) -> None:
    accepted = 0
    for number in range(fuzz_rounds):
        rng = random.Random(-1 - number)
        for _ in range(BODIES_A_ROUND):
            start = rng.choice(STARTS)
            body = start.spec.body()
            accepted += agree(scrambled(body, start.held(body), rng), start.inputs) is not None
    assert 0.2 < accepted / (fuzz_rounds * BODIES_A_ROUND) < 0.8, "the mutations are too strong or too weak"


@pytest.mark.parametrize(
    "start", [start for start in STARTS if start.inputs.open_samples and start.spec.rows is not None]
)
def test_rows_that_are_recorded_already_are_not_read(start: Start) -> None:
    """They are skipped by their length, even if they contain a quote or are not valid JSON."""
    body = start.spec.body()
    plain = reference_turn(read_with(body, start.inputs))
    first, end = start.held(body)
    assert end > first
    for seed in range(20):
        noise = random.Random(seed).randbytes(end - first)
        assert reference_turn(read_with(body[:first] + noise + body[end:], start.inputs)) == plain
        assert reference_turn(read_with(body[:first] + b'"' * (end - first) + body[end:], start.inputs)) == plain
