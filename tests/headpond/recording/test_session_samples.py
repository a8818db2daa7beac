import asyncio
import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conversations import started
from support.engine_responses import request_info
from support.plain_samples import PlainSample, PlainTurn, merge, turn_structures
from support.stores import directory_store

from headpond.engines.responses.response import read_turn
from headpond.recording import Session
from headpond.records.rollout import Recorded
from headpond.store.columns import Columns, read_columns
from headpond.store.experts import Experts
from headpond.store.files import FileStore
from headpond.turn import CheckRoutes, RouteFormat, TurnMetadata

SHAPE = (1, 2)
EVERY_ROW = RouteFormat(check=CheckRoutes.ALL)


def body(turn: PlainTurn, dtype: Any) -> bytes:
    """A response of vLLM. A row of zeros means that none was captured."""
    choice: dict[str, Any] = {
        "message": {"role": "assistant", "content": "text"},
        "logprobs": {"content": [{"token": "t", "logprob": logprob} for logprob in turn.logprobs]},
        "finish_reason": "stop",
        "token_ids": turn.completion,
    }
    if turn.rows:
        tokens = len(turn.prompt) + len(turn.completion)
        first, end = min(turn.rows), max(max(turn.rows) + 1, tokens - 1)
        rows = np.array([turn.rows.get(position, [[0, 0]]) for position in range(first, end)], dtype)
        data, shape = base64.b64encode(rows.tobytes()).decode(), list(rows.shape)
        choice["routed_experts"] = {"data": data, "shape": shape, "start": first, "dtype": np.dtype(dtype).name}
    return json.dumps({"choices": [choice], "prompt_token_ids": turn.prompt}, separators=(",", ":")).encode()


async def record(session: Session, turn: PlainTurn, dtype: Any) -> None:
    with session.claim() as claim:
        prepared = session.prepare(claim)
        request = request_info(max_seq_len=session.settings.max_seq_len)
        read = read_turn(
            body(turn, dtype), open_samples=prepared.open_samples, request=request, route_format=prepared.route_format
        )
        assert await session.commit(claim, prepared, read, TurnMetadata(agent=turn.agent))


async def recorded(store: FileStore, turns: list[PlainTurn], limits: Any, dtype: Any, killed_after: int) -> Recorded:
    """Record all turns in a session, which another process recovers after some turns."""
    session = await started(store, **limits)
    for number, turn in enumerate(turns):
        if number == killed_after:
            session = await Session.recover(store, session.settings.key, route_format=EVERY_ROW)
        await record(session, turn, dtype)
    return await session.seal()


def assert_rows(store: FileStore, sealed: Recorded, columns: Columns, expected: list[PlainSample], dtype: Any) -> None:
    if sealed.experts is None:
        assert not any(sample.rows for sample in expected)
        return
    experts = Experts(store, sealed.experts)
    assert experts.rows.dtype == dtype
    for index, sample in enumerate(expected):
        out = np.empty((len(sample.ids), *SHAPE), np.int32)
        experts.read(index, 0, len(sample.ids), out)
        rows = [sample.rows.get(position, [[-1, -1]]) for position in range(len(sample.ids))]
        assert out.tobytes() == np.array(rows, np.int32).reshape(out.shape).tobytes()
        valid = bytes(position in sample.rows for position in range(len(sample.ids)))
        assert experts.routed_valid[columns.sample(index)].tobytes() == valid


@settings(max_examples=80)
@given(
    case=turn_structures(exact=True).filter(lambda case: bool(case[0])),
    dtype=st.sampled_from([np.uint8, np.uint16]),
    killed_after=st.integers(1, 7),
)
def test_blobs_of_recorded_responses_equal_the_reference(case: Any, dtype: Any, killed_after: int) -> None:
    turns, limits = case
    expected, _ = merge(turns, **limits)
    with tempfile.TemporaryDirectory() as root:
        store = directory_store(Path(root))
        sealed = asyncio.run(recorded(store, turns, limits, dtype, killed_after))
        columns = read_columns(store, sealed.columns)
        assert sealed.sample_lengths == tuple(len(sample.ids) for sample in expected)
        assert columns.input_ids.tolist() == [token for sample in expected for token in sample.ids]
        assert columns.loss_mask.tolist() == [value for sample in expected for value in sample.mask]
        logprobs = [value for sample in expected for value in sample.logprobs]
        assert columns.logprobs.tobytes() == np.array(logprobs, np.float32).tobytes()
        assert columns.truncated.tolist() == [sample.truncated for sample in expected]
        assert_rows(store, sealed, columns, expected, dtype)
