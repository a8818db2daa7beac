"""Sampling masks, from the servers' answers to the rollout's columns, also after a recovery."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from support.engine_clients import run
from support.engine_responses import compact
from support.real_responses import COMPLETION, LOGPROBS, PROMPT, sglang_chat, vllm_generate
from support.stores import directory_store

from headpond.config.engine import Engine
from headpond.engines.dialects import Prompt, load_dialect
from headpond.engines.responses.continuation import joined, open_sample_of
from headpond.engines.responses.response import RequestInfo, read_turn
from headpond.errors import Upstream
from headpond.recording import Session, SessionSettings
from headpond.store.columns import Columns, read_columns
from headpond.turn import OpenSample, Turn

MASKS = [[21], [5, 22, 7], [23, 9]]
ANSWERS = {"generate": vllm_generate, "sglang": sglang_chat}
both = pytest.mark.parametrize("dialect", ANSWERS)


def read(dialect: str, masks: Any, *, open_samples: list[OpenSample] | None = None, **fields: Any) -> Turn:
    settings = Engine(dialect=dialect, sampling_masks=True)
    prompt = np.array(fields.get("prompt", PROMPT), np.int32)
    how = {name: fields.pop(name) for name in ("continues", "max_seq_len") if name in fields}
    info = RequestInfo(dialect=load_dialect(dialect)(settings), prompt_ids=prompt, **how)
    body = compact(ANSWERS[dialect](sampling_mask=masks, **fields))
    return read_turn(body, request=info, open_samples=open_samples or [])


@both
def test_masks_are_recorded_and_recovered(tmp_path: Path, dialect: str) -> None:
    recorded: list[Columns] = []

    async def main() -> None:
        store = directory_store(tmp_path)
        settings = SessionSettings(session="s", key="rollouts/r/1.aa", rollout="r", attempt=1)
        session = await Session.start(store, settings)
        with session.claim() as claim:
            prepared = session.prepare(claim)
            assert await session.commit(claim, prepared, read(dialect, MASKS))
        again = await Session.recover(store, settings.key)
        recorded.append(read_columns(store, (await again.seal()).columns))

    run(main)
    (columns,) = recorded
    assert [columns.support(token).tolist() for token in range(6)] == [[], [], [], *MASKS]


@both
def test_masks_of_a_cut_and_of_a_continued_completion_fit_its_tokens(dialect: str) -> None:
    cut = read(dialect, MASKS, max_seq_len=5).sampling_mask
    assert cut is not None
    assert (cut.ids.tolist(), cut.lengths.tolist()) == ([21, 5, 22, 7], [1, 3])
    first = read(dialect, MASKS, finish_reason="abort", continues=lambda: True)
    rest = read(dialect, [[30, 31]], prompt=PROMPT + COMPLETION, completion=[31], logprobs=[-1.0],
                open_samples=[open_sample_of(first, [])])  # fmt: skip
    whole = joined(first, rest).sampling_mask
    assert whole is not None
    assert (whole.ids.tolist(), whole.lengths.tolist()) == ([21, 5, 22, 7, 23, 9, 30, 31], [1, 3, 2, 2])


@both
@pytest.mark.parametrize(
    ("masks", "why"),
    [
        (None, "--return-sampling-mask"),
        (MASKS[:2], "2 sampling masks for 3 tokens"),
        ([[21], [5], [23]], "without the token that was sampled"),
        ([[21], [], [23]], "without the token that was sampled"),
        ([[21], [22], [-1, 23]], "sampling mask"),
        ({}, "sampling mask"),
    ],
    ids=str,
)
def test_wrong_masks_are_refused(dialect: str, masks: Any, why: str) -> None:
    with pytest.raises(Upstream, match=why):
        read(dialect, masks)


def test_a_rollout_without_masks_has_empty_sets(tmp_path: Path) -> None:
    async def main() -> None:
        store = directory_store(tmp_path)
        settings = SessionSettings(session="s", key="rollouts/r/1.aa", rollout="r", attempt=1)
        session = await Session.start(store, settings)
        plain = RequestInfo(dialect=load_dialect("generate")(Engine()), prompt_ids=np.array(PROMPT, np.int32))
        with session.claim() as claim:
            turn = read_turn(compact(vllm_generate(sampling_mask=MASKS)), request=plain)
            await session.commit(claim, session.prepare(claim), turn)
        columns = read_columns(store, (await session.seal()).columns)
        assert columns.support_ids is None
        assert columns.support(3).tolist() == []
        assert columns.logprobs[3:].tolist() == LOGPROBS

    run(main)


def test_masks_are_requested_where_the_server_sends_them() -> None:
    sent = load_dialect("sglang")(Engine(dialect="sglang", sampling_masks=True)).request_body(Prompt(messages=[]), {})
    assert b'"return_sampling_mask":true' in sent
    assert b"sampling_mask" not in load_dialect("sglang")(Engine(dialect="sglang")).request_body(
        Prompt(messages=[]), {}
    )
    with pytest.raises(ValidationError, match=r'sampling masks .*dialect = "generate"'):
        Engine(dialect="vllm", sampling_masks=True)
