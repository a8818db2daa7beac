import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conversations import turn_of_ids
from support.plain_samples import merge, turn_structures

from headpond.errors import Invariant, PolicyFailure
from headpond.recording.sample_columns import columns_of, routed_valid_of
from headpond.recording.sample_tree import SampleTree, sample_tree
from headpond.recording.samples import Samples
from headpond.turn import RouteFormat, Routes, SaidVersion, TurnMetadata

VECTORS = [json.loads(line) for line in (Path(__file__).parents[2] / "vectors" / "merge.jsonl").open()]


class Recorder:
    """Samples, and their routed rows in the order of writing."""

    def __init__(self, **limits: Any) -> None:
        self.max_seq_len = limits.pop("max_seq_len", None)
        self.samples = Samples(**limits)
        self.rows: list[np.ndarray] = []

    @property
    def tree(self) -> SampleTree:
        return sample_tree(self.samples)

    def turn(self, prompt: list[int], completion: list[int], logprobs: list[float] | None = None, **more: Any) -> None:
        turn = turn_of_ids(
            np.array(prompt, np.int32),
            np.array(completion, np.int32),
            np.array([-1.0] * len(completion) if logprobs is None else logprobs, np.float32),
            open_samples=list(self.samples.open_samples().values()),
            routes=more.pop("routes", None),
            spans=more.pop("spans", ()),
            ended=more.pop("ended", None),
            max_seq_len=self.max_seq_len,
        )
        read_with = self.samples.open_samples()
        arrival = len(self.samples.turns)
        delta, rows = self.samples.place(turn, TurnMetadata(**more), arrival=arrival, read_with=read_with)
        self.samples.add(delta, turn.sequence)
        self.rows += [row for run in rows for row in run]

    def columns(self, **more: Any):
        return columns_of(self.tree, rollout="r", attempt=1, logprobs_mode="processed", **more)

    def rows_by_position(self, sample: int) -> dict[int, np.ndarray]:
        """The rows of a sample in the experts file."""
        placed = dict[int, np.ndarray]()
        for chunk in self.tree.chunks():
            assert chunk.row is not None
            for offset in range(chunk.rows if chunk.sample == sample else 0):
                assert chunk.first + offset not in placed
                placed[chunk.first + offset] = self.rows[chunk.row + offset]
        return placed


def routes_of(rows: np.ndarray, first: int = 0, valid: np.ndarray | None = None) -> Routes:
    return Routes(first=first, rows=rows, valid=valid, format=RouteFormat())


@pytest.mark.parametrize("case", VECTORS, ids=range(len(VECTORS)))
def test_samples_equal_those_of_prime_rl(case: dict[str, Any]) -> None:
    recorder = Recorder()
    for turn in case["turns"]:
        payload = turn.get("routed_experts")
        rows = payload and np.frombuffer(base64.b64decode(payload["data"]), np.uint8).reshape(payload["shape"])
        recorder.turn(
            turn["prompt_ids"],
            turn["completion_ids"],
            turn["completion_logprobs"],
            routes=None if rows is None else routes_of(rows),
            temperature=turn["temperature"],
        )
    columns = recorder.columns(error="failed" if case["error"] else "")
    assert columns.truncated.size == len(case["samples"])
    for index, expected in enumerate(case["samples"]):
        where, prompt = columns.sample(index), len(expected["prompt_ids"])
        assert columns.input_ids[where].tolist() == expected["prompt_ids"] + expected["completion_ids"]
        assert columns.first_prompt_length[index] == prompt
        assert columns.loss_mask[where].tolist() == [0] * prompt + expected["completion_mask"]
        logprobs = np.array([0.0] * prompt + expected["completion_logprobs"], np.float32)
        assert columns.logprobs[where].tobytes() == logprobs.tobytes()
        assert_temperatures(columns, index, expected["completion_temperatures"])
        payload, placed = expected["routed_experts"], recorder.rows_by_position(index)
        if payload is None:
            assert not placed
            continue
        rows = np.zeros(payload["shape"], payload["dtype"])
        for position, row in placed.items():
            rows[position] = row
        assert base64.b64encode(rows.tobytes()).decode() == payload["data"]
        valid = routed_valid_of(recorder.tree)[where]
        assert valid.tolist() == [position in placed for position in range(where.stop - where.start)]


def assert_temperatures(columns: Any, sample: int, expected: list[float]) -> None:
    turns = columns.turns.sample == sample
    assert set(columns.turns.temperature[turns].tolist()) == {np.float32(value) for value in expected}


def test_two_agents_interleaved_give_two_samples() -> None:
    recorder = Recorder()
    recorder.turn([1, 2], [3], agent="a")
    recorder.turn([1, 2, 3, 4], [5], agent="a")
    recorder.turn([9], [8], agent="b")
    recorder.turn([1, 2, 3, 4, 5, 6], [7], agent="a")
    columns = recorder.columns()
    assert columns.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 9, 8]
    assert columns.sample_offsets.tolist() == [0, 7, 9]
    assert columns.loss_mask.tolist() == [0, 0, 1, 0, 1, 0, 1, 0, 1]
    assert columns.turns.sample.tolist() == [0, 0, 1, 0]
    assert columns.turns.start.tolist() == [2, 4, 8, 6]
    assert columns.turns.end.tolist() == [3, 5, 9, 7]
    assert [columns.turns.words["agent"][index] for index in columns.turns.agent] == ["a", "a", "b", "a"]
    assert recorder.tree.tokens_by_agent() == {"a": 3, "b": 1}
    assert recorder.tree.metrics() == {
        "samples": 2, "turns": 4, "breaks": 0, "wasted_tokens": 0, "ambiguous_turns": 0, "unknown_logprobs": 0,
        "repaired_echoes": 0, "unseen_turns": 0,
    }  # fmt: skip


def test_the_longest_matching_sample_is_extended_and_ambiguity_is_counted() -> None:
    recorder = Recorder()
    recorder.turn([1], [2])
    recorder.turn([1], [2, 3])
    recorder.turn([1, 2, 3, 4], [5])
    assert recorder.columns().input_ids.tolist() == [1, 2, 1, 2, 3, 4, 5]
    assert recorder.tree.metrics()["ambiguous_turns"] == 1


def test_broken_prefixes_are_counted() -> None:
    recorder = Recorder()
    recorder.turn([1, 2, 3], [4])
    recorder.turn([1, 2, 7, 4, 5], [6])
    recorder.turn([1, 2], [9])
    recorder.turn([50], [51], agent="other")
    metrics = recorder.tree.metrics()
    assert (metrics["samples"], metrics["breaks"]) == (4, 2)
    assert metrics["first_break_position"] == 2
    assert metrics["wasted_tokens"] == 2 + 2


def test_missing_routes_are_counted() -> None:
    rows, recorder = np.ones((9, 1, 1), np.uint8), Recorder()
    recorder.turn([1, 2], [3], routes=routes_of(rows[:2]))
    assert recorder.tree.metrics()["missing_routes"] == 0
    recorder.turn([1, 2, 3, 4], [5])
    recorder.turn([1, 2, 3, 4, 5, 6], [7], routes=routes_of(rows[:6]))
    assert recorder.tree.metrics()["missing_routes"] == 2


def test_a_limit_on_samples_is_the_policys_failure_and_changes_nothing() -> None:
    recorder = Recorder(max_samples=1)
    recorder.turn([1], [2])
    with pytest.raises(PolicyFailure, match="1 samples are allowed"):
        recorder.turn([5], [6])
    recorder.turn([1, 2], [3])
    assert recorder.columns().input_ids.tolist() == [1, 2, 3]


def test_truncation_cuts_the_completion_then_the_prompt() -> None:
    rows = np.arange(6, dtype=np.uint8).reshape(6, 1, 1)
    cases = [
        ([1, 2, 3], [4, 5, 6], [1, 2, 3, 4], (1, 0), 4),
        ([1, 2, 3, 4], [5], [1, 2, 3, 4], (1, 0), 4),
        ([1, 2, 3, 4], [], [1, 2, 3, 4], (0, 0), 4),
        ([1, 2, 3, 4, 5], [6], [1, 2, 3, 4], (1, 1), 4),
        ([1, 2], [3, 4], [1, 2, 3, 4], (0, 0), 3),
    ]
    for prompt, completion, kept, flags, valid in cases:
        recorder = Recorder(max_seq_len=4)
        sent = rows[: len(prompt) + len(completion) - (len(completion) > 0)]
        recorder.turn(prompt, completion, routes=routes_of(sent))
        columns = recorder.columns()
        assert columns.input_ids.tolist() == kept
        assert (columns.truncated[0], columns.overlong_prompt[0]) == flags
        assert len(recorder.rows) == valid
        assert routed_valid_of(recorder.tree).sum() == valid


def test_a_turn_after_a_truncated_one_adds_nothing() -> None:
    recorder = Recorder(max_seq_len=4)
    recorder.turn([1, 2, 3], [4, 5])
    recorder.turn([1, 2, 3, 4, 5, 6], [7])
    columns = recorder.columns()
    assert columns.input_ids.tolist() == [1, 2, 3, 4]
    assert columns.turns.start.tolist() == [3, 4]
    assert columns.turns.end.tolist() == [4, 4]
    assert columns.overlong_prompt.tolist() == [1]


def test_an_empty_completion_is_a_sample_without_loss() -> None:
    recorder = Recorder()
    recorder.turn([1, 2], [])
    recorder.turn([1, 2], [3])
    columns = recorder.columns()
    assert columns.input_ids.tolist() == [1, 2, 3]
    assert columns.loss_mask.tolist() == [0, 0, 1]


def test_no_turns_give_no_samples() -> None:
    columns = Recorder().columns(error="the sandbox never started")
    assert columns.truncated.size == columns.input_ids.size == columns.turns.sample.size == 0
    assert columns.sample_offsets.tolist() == [0]


def test_an_environment_may_mask_tokens_of_a_completion() -> None:
    recorder = Recorder(max_seq_len=3)
    recorder.turn([1], [2, 3, 4], completion_mask=np.array([0, 1, 1], np.uint8))
    assert recorder.columns().loss_mask.tolist() == [0, 0, 1]
    with pytest.raises(Invariant, match="mask of 1 entries"):
        recorder.turn([7], [2, 3, 4], completion_mask=np.array([0], np.uint8))


def versions(recorder: Recorder) -> tuple[list[int], list[int], list[int]]:
    table = recorder.columns().turns
    return table.version_first.tolist(), table.version_last.tolist(), table.version_exact.tolist()


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (SaidVersion(4, exact=True), (4, 4, 1)),
        (SaidVersion(6, exact=True), (4, 6, 0)),
        (SaidVersion(4, exact=False), (4, 4, 0)),
        (None, (4, 4, 0)),
    ],
)
def test_a_version_is_exact_where_the_replica_said_the_same_before_and_after(
    after: SaidVersion | None, expected: tuple[int, int, int]
) -> None:
    recorder = Recorder()
    recorder.turn([1], [2, 3], version=SaidVersion(4, exact=True), answered_at=1.0)
    assert recorder.samples.unsettled() == [0]
    assert versions(recorder) == ([4], [4], [0])
    recorder.samples.settle_version(0, after)
    assert recorder.samples.unsettled() == []
    assert versions(recorder) == tuple([value] for value in expected)
    assert recorder.tree.inexact_tokens() == (0 if expected[2] else 2)


def test_versions_that_a_response_states_for_its_tokens_are_exact() -> None:
    recorder = Recorder()
    recorder.turn([1], [2, 3], spans=[(5, 0, 2)], version=SaidVersion(4, exact=True), answered_at=1.0)
    recorder.turn([1, 2, 3, 7], [4, 5, 6], spans=[(5, 0, 1), (6, 1, 3)], version=SaidVersion(4, exact=True))
    assert recorder.samples.unsettled() == []
    assert versions(recorder) == ([5, 5], [5, 6], [1, 1])
    columns = recorder.columns()
    assert columns.span_turn.tolist() == [1, 1]
    assert columns.span_start.tolist() == [4, 5]
    assert columns.span_version.tolist() == [5, 6]


@pytest.mark.parametrize(("before", "ended", "expected"), [(4, 4, (4, 4, 1)), (4, 6, (4, 6, 0))])
def test_a_response_that_states_its_last_version_is_compared_with_what_came_before(
    before: int, ended: int, expected: tuple[int, int, int]
) -> None:
    recorder = Recorder()
    recorder.turn([1], [2], ended=ended, version=SaidVersion(before, exact=True), answered_at=1.0)
    assert recorder.samples.unsettled() == []
    assert versions(recorder) == tuple([value] for value in expected)


def test_recorded_arrays_are_copies() -> None:
    recorder = Recorder()
    recorder.turn([1, 2, 3], [4])
    recorder.turn([1, 2, 3, 4, 5], [6])
    delta = recorder.samples.turns[1]
    assert delta.prompt_ids.base is None
    assert delta.prompt_ids.tolist() == [5]


def as_routes(rows: dict[int, Any], dtype: Any) -> Routes | None:
    if not rows:
        return None
    first, end = min(rows), max(rows) + 1
    array = np.array([rows.get(position, [[0, 0]]) for position in range(first, end)], dtype)
    valid = np.array([position in rows for position in range(first, end)])
    return routes_of(array, first, None if valid.all() else valid)


@settings(max_examples=200)
@given(case=turn_structures(), error=st.booleans(), dtype=st.sampled_from([np.uint8, np.uint16]))
def test_samples_rows_and_validity_equal_the_reference(case: Any, error: bool, dtype: Any) -> None:
    turns, limits = case
    expected, ambiguous = merge(turns, error=error, **limits)
    recorder = Recorder(**limits)

    def scaled(row: list[list[int]]) -> list[list[int]]:
        return [[value * (1 if dtype == np.uint8 else 200) for value in layer] for layer in row]

    for turn in turns:
        routes = as_routes({position: scaled(row) for position, row in turn.rows.items()}, dtype)
        recorder.turn(turn.prompt, turn.completion, turn.logprobs, routes=routes, agent=turn.agent)
    columns, valid = recorder.columns(error="failed" if error else ""), routed_valid_of(recorder.tree)
    assert columns.truncated.tolist() == [sample.truncated for sample in expected]
    assert columns.overlong_prompt.tolist() == [sample.overlong for sample in expected]
    assert columns.first_prompt_length.tolist() == [sample.first_prompt for sample in expected]
    assert columns.metrics["ambiguous_turns"] == ambiguous
    for index, sample in enumerate(expected):
        where = columns.sample(index)
        assert columns.input_ids[where].tobytes() == np.array(sample.ids, np.int32).tobytes()
        assert columns.loss_mask[where].tobytes() == bytes(sample.mask)
        assert columns.logprobs[where].tobytes() == np.array(sample.logprobs, np.float32).tobytes()
        assert valid[where].tobytes() == bytes(position in sample.rows for position in range(len(sample.ids)))
        placed = {position: row.tolist() for position, row in recorder.rows_by_position(index).items()}
        assert placed == {position: scaled(row) for position, row in sample.rows.items()}
