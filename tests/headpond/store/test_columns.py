import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from support.stores import directory_store

from headpond.errors import StageError
from headpond.store.columns import Columns, TurnTable, read_columns, write_columns
from headpond.store.files import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return directory_store(tmp_path)


def some_columns(**changes: Any) -> Columns:
    turns = TurnTable(
        sample=np.array([0, 1, 0], np.int32),
        start=np.array([2, 6, 4], np.int64),
        end=np.array([3, 6, 5], np.int64),
        version_first=np.array([3, 3, 4], np.int32),
        version_last=np.array([3, 4, 4], np.int32),
        version_exact=np.array([1, 0, 1], np.uint8),
        temperature=np.array([0.7, 1.0, 0.7], np.float32),
        reward=np.array([0.5, 1.0, -0.5]),
        finish_reason=np.array([0, 0, 1], np.int32),
        agent=np.array([0, 1, 0], np.int32),
        engine=np.zeros(3, np.int32),
        sampling=np.zeros(3, np.int32),
        unseen=np.array([0, 1, 0], np.uint8),
        begun_at=np.array([1.5, 2.5, 1e9]),
        seconds=np.array([0.25, 0.5, 0.0], np.float32),
        words={"finish_reason": ["stop", "length"], "agent": ["löser", ""], "engine": ["http://a"], "sampling": ["{}"]},
    )
    columns = Columns(
        rollout="r7",
        attempt=2,
        logprobs_mode="processed",
        input_ids=np.arange(6, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 0, 1, 0], np.uint8),
        logprobs=np.array([0, 0, -0.5, 0, -1.5, 0], np.float32),
        sample_offsets=np.array([0, 5, 6], np.int64),
        first_prompt_length=np.array([2, 1], np.int32),
        truncated=np.array([0, 1], np.uint8),
        overlong_prompt=np.array([0, 1], np.uint8),
        parent=np.array([-1, 0], np.int32),
        agent=np.array([0, 1], np.int32),
        turns=turns,
        metrics={"samples": 2.0},
        spans=[["tool", "löschen", 1.5, 0.25]],
        token_fields={"process.reward": np.linspace(0, 1, 6, dtype=np.float32), "tag": np.arange(6, dtype=np.uint8)},
        sample_fields={"level": np.array([3, -4], np.int32)},
        conversation=np.frombuffer(b'[{"role":"user"}]', np.uint8),
    )
    return dataclasses.replace(columns, **changes)


def assert_same(left: Any, right: Any) -> None:
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        elif isinstance(a, TurnTable):
            assert_same(a, b)
        elif field.name in ("token_fields", "sample_fields"):
            assert a.keys() == b.keys()
            for name in a:
                np.testing.assert_array_equal(a[name], b[name])
        else:
            assert a == b


def test_columns_survive_writing_and_reading(store: FileStore) -> None:
    columns = some_columns()
    ref = write_columns(store, "columns", columns)
    assert_same(read_columns(store, ref), columns)
    assert read_columns(store, ref).sample(1) == slice(5, 6)


def test_samples_have_a_parent_and_an_agent_also_in_files_of_earlier_releases() -> None:
    columns = some_columns()
    earlier = some_columns(
        parent=None, agent=None, turns=dataclasses.replace(columns.turns, unseen=None, begun_at=None, seconds=None)
    )
    assert [columns.agent_of(0), columns.agent_of(1)] == [earlier.agent_of(0), earlier.agent_of(1)] == ["löser", ""]
    assert (columns.parent_of(1), earlier.parent_of(1)) == (0, -1)


def test_empty_columns_survive_writing_and_reading(store: FileStore) -> None:
    none, turns = np.empty(0, np.int32), some_columns().turns
    empty = dataclasses.replace(
        turns, **{f.name: getattr(turns, f.name)[:0] for f in dataclasses.fields(turns) if f.name != "words"}
    )
    columns = some_columns(
        input_ids=none,
        first_prompt_length=none,
        parent=none,
        agent=none,
        sample_offsets=np.zeros(1, np.int64),
        turns=empty,
        **{name: none.astype(np.uint8) for name in ("loss_mask", "truncated", "overlong_prompt")},
        logprobs=none.astype(np.float32),
        token_fields={},
        sample_fields={},
        error="no turn was made",
    )
    assert_same(read_columns(store, write_columns(store, "columns", columns)), columns)


def test_the_official_reader_opens_columns(store: FileStore) -> None:
    write_columns(store, "columns", some_columns())
    with safe_open(store.root / "columns", framework="np") as file:
        assert file.get_tensor("input_ids").tolist() == list(range(6))
        assert file.get_tensor("extra.process.reward").dtype == np.float32
        assert file.metadata()["rollout"] == '"r7"'


def test_every_array_read_is_aligned(store: FileStore) -> None:
    columns = read_columns(store, write_columns(store, "columns", some_columns()))
    assert columns.sample_offsets.flags.aligned
    assert columns.turns.start.flags.aligned
    assert columns.logprobs.flags.aligned


@pytest.mark.parametrize(
    "changes",
    [
        {"input_ids": np.arange(6)},
        {"logprobs": np.zeros(5, np.float32)},
        {"sample_offsets": np.array([0, 6], np.int64)},
        {"sample_offsets": np.array([0, 7, 6], np.int64)},
        {"sample_offsets": np.array([1, 5, 6], np.int64)},
        {"token_fields": {"x": np.zeros(5, np.float32)}},
        {"token_fields": {"x": np.zeros(6, np.complex64)}},
        {"sample_fields": {"x": np.zeros(6, np.float32)}},
        {"truncated": np.zeros(3, np.uint8)},
    ],
)
def test_inconsistent_columns_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(StageError):
        some_columns(**changes)
