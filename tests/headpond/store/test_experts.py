from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from support.stores import directory_store

from headpond.errors import StageError
from headpond.store.experts import Chunk, Experts, seal_experts
from headpond.store.files import FileStore
from headpond.store.parts import HEAD


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return directory_store(tmp_path)


def some_experts(store: FileStore, dtype: Any = np.uint8, layers: int = 3, topk: int = 2) -> tuple[Experts, np.ndarray]:
    """Two interleaved samples of 6 and 4 positions; the last of each and position 2 of the second never came."""
    high = np.iinfo(dtype).max
    rows = np.random.default_rng(1).integers(0, high, (7, layers, topk), dtype, endpoint=True)
    chunks = [Chunk(sample=0, first=0, rows=3), Chunk(sample=1, first=0, rows=2), Chunk(sample=0, first=3, rows=2)]
    part = store.part("experts", reserve_head=True)
    for start, stop in ((0, 3), (3, 5), (5, 7)):
        part.append(rows[start:stop])
    valid = np.array([1, 1, 1, 1, 1, 0, 1, 1, 0, 0], np.uint8)
    ref = seal_experts(
        store, "experts", part, chunks=chunks, routed_valid=valid, row=(layers, topk), dtype=np.dtype(dtype),
        rollout="r7", attempt=1,
    )  # fmt: skip
    return Experts(store, ref), rows


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_rows_are_read_by_position_when_samples_are_interleaved(store: FileStore, dtype: Any) -> None:
    experts, rows = some_experts(store, dtype)
    out = np.empty((6, 3, 2), np.int32)
    experts.read(0, 0, 6, out)
    np.testing.assert_array_equal(out, np.concatenate([rows[[0, 1, 2, 5, 6]], np.full((1, 3, 2), -1)]))
    out = np.empty((3, 3, 2), np.int32)
    experts.read(1, 1, 4, out, missing=0)
    np.testing.assert_array_equal(out, np.concatenate([rows[[4]], np.zeros((2, 3, 2))]))
    experts.read(0, 2, 5, out)
    np.testing.assert_array_equal(out, rows[[2, 5, 6]])
    assert experts.routed_valid.tolist() == [1, 1, 1, 1, 1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("missing", [-1, 0, "dummy"])
def test_a_range_of_positions_is_a_slice_of_all_of_them(store: FileStore, missing: Any) -> None:
    experts, _ = some_experts(store)
    for sample, length in ((0, 6), (1, 4), (2, 3)):
        whole = np.empty((length, 3, 2), np.int16)
        experts.read(sample, 0, length, whole, missing=missing)
        for start in range(length + 1):
            for stop in range(start, length + 1):
                out = np.full((stop - start, 3, 2), 99, np.int16)
                experts.read(sample, start, stop, out, missing=missing)
                np.testing.assert_array_equal(out, whole[start:stop])


@pytest.mark.parametrize("layers", [slice(1, 3), [2, 0], [1], slice(0, 0)])
def test_a_reader_takes_the_layers_it_needs(store: FileStore, layers: Any) -> None:
    experts, rows = some_experts(store)
    out = np.empty((2, len(np.arange(3)[layers]), 2), np.uint8)
    experts.read(0, 3, 5, out, layers=layers, missing="dummy")
    np.testing.assert_array_equal(out, rows[5:7, layers])


def test_dummy_rows_name_distinct_experts(store: FileStore) -> None:
    experts, _ = some_experts(store)
    out = np.empty((1, 3, 2), np.int16)
    experts.read(0, 5, 6, out, missing="dummy")
    assert out.tolist() == [[[0, 1]] * 3]


@pytest.mark.parametrize(
    ("rows", "out", "missing"), [(np.uint8, np.uint8, -1), (np.uint16, np.int16, 0), (np.uint16, np.uint8, 0)]
)
def test_an_array_that_cannot_hold_the_rows_is_refused(store: FileStore, rows: Any, out: Any, missing: Any) -> None:
    experts, _ = some_experts(store, rows)
    with pytest.raises(StageError, match="cannot hold"):
        experts.read(0, 0, 1, np.empty((1, 3, 2), out), missing=missing)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_official_reader_opens_experts(store: FileStore, dtype: Any) -> None:
    _, rows = some_experts(store, dtype)
    with safe_open(store.root / "experts", framework="np") as file:
        np.testing.assert_array_equal(file.get_tensor("rows"), rows)
        assert file.get_tensor("chunks").tolist() == [[0, 0, 3], [1, 0, 2], [0, 3, 2]]
        assert file.metadata() == {"format": "headpond.experts.1", "rollout": "r7", "attempt": "1"}
    assert (store.root / "experts").read_bytes()[HEAD:].startswith(rows.tobytes())


def test_an_experts_part_with_missing_rows_is_not_sealed(store: FileStore) -> None:
    part = store.part("experts", reserve_head=True)
    with pytest.raises(StageError, match="0 bytes for 2 rows"):
        seal_experts(
            store, "experts", part, chunks=[Chunk(sample=0, first=0, rows=2)], routed_valid=np.ones(2, np.uint8),
            row=(1, 1), dtype=np.dtype(np.uint8), rollout="r", attempt=1,
        )  # fmt: skip
