import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from penstock.blobs import Store, tensors
from penstock.blobs.columns import Columns, TurnTable, read_columns, write_columns
from penstock.blobs.experts import Chunk, Experts, seal_experts
from penstock.blobs.parts import HEAD
from penstock.errors import BlobCorrupt, StageError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def some_columns(**changes: Any) -> Columns:
    turns = TurnTable(
        sample=np.array([0, 1, 0], np.int32),
        start=np.array([2, 6, 4], np.int64),
        end=np.array([3, 6, 5], np.int64),
        version_first=np.array([3, 3, 4], np.int32),
        version_last=np.array([3, 4, 4], np.int32),
        temperature=np.array([0.7, 1.0, 0.7], np.float32),
        finish_reason=np.array([0, 0, 1], np.int32),
        agent=np.array([0, 1, 0], np.int32),
        engine=np.zeros(3, np.int32),
        sampling=np.zeros(3, np.int32),
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
        turns=turns,
        metrics={"samples": 2.0},
        extras={"process.reward": np.linspace(0, 1, 6, dtype=np.float32)},
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
        elif field.name == "extras":
            assert a.keys() == b.keys()
            for name in a:
                np.testing.assert_array_equal(a[name], b[name])
        else:
            assert a == b


def test_columns_come_back(store: Store) -> None:
    columns = some_columns()
    ref = write_columns(store, "columns", columns)
    assert_same(read_columns(store, ref), columns)
    assert read_columns(store, ref).sample(1) == slice(5, 6)


def test_columns_of_nothing_come_back(store: Store) -> None:
    none, turns = np.empty(0, np.int32), some_columns().turns
    empty = dataclasses.replace(
        turns, **{f.name: getattr(turns, f.name)[:0] for f in dataclasses.fields(turns) if f.name != "words"}
    )
    columns = some_columns(
        input_ids=none,
        first_prompt_length=none,
        sample_offsets=np.zeros(1, np.int64),
        turns=empty,
        **{name: none.astype(np.uint8) for name in ("loss_mask", "truncated", "overlong_prompt")},
        logprobs=none.astype(np.float32),
        extras={},
        error="no turn was made",
    )
    assert_same(read_columns(store, write_columns(store, "columns", columns)), columns)


def test_the_official_reader_opens_columns(store: Store) -> None:
    write_columns(store, "columns", some_columns())
    with safe_open(store.root / "columns", framework="np") as file:
        assert file.get_tensor("input_ids").tolist() == list(range(6))
        assert file.get_tensor("extra.process.reward").dtype == np.float32
        assert file.metadata()["rollout"] == '"r7"'


def test_every_array_read_is_aligned(store: Store) -> None:
    columns = read_columns(store, write_columns(store, "columns", some_columns(extras={})))
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
        {"extras": {"x": np.zeros(6)}},
        {"truncated": np.zeros(3, np.uint8)},
    ],
)
def test_columns_that_disagree_are_not_made(changes: dict[str, Any]) -> None:
    with pytest.raises(StageError):
        some_columns(**changes)


def test_a_foreign_blob_is_no_columns_file(store: Store) -> None:
    refs = [
        store.put("text", [b"hello"]),
        store.put("zeros", [bytes(10_000)]),
        store.put("huge-header", [b"\xff" * 64]),
        store.put("list", [(2).to_bytes(8, "little"), b"[]"]),
        store.put("nothing", []),
        tensors.write(store, "other", {"x": np.zeros(3)}, {}),
        tensors.write(store, "half", {"input_ids": np.zeros(3, np.int32)}, {"format": "penstock.columns.1"}),
    ]
    for ref in refs:
        with pytest.raises(BlobCorrupt, match=f"blob {ref.key} is "):
            read_columns(store, ref)
        with pytest.raises(BlobCorrupt, match=f"blob {ref.key} is "):
            Experts(store, ref)


@pytest.mark.parametrize(
    "entry",
    [
        '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,3]}',
        '"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}',
        '"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}',
        '"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}',
        '"a":{"dtype":"Q8","shape":[4],"data_offsets":[0,4]}',
        '"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,4]}',
        '"a":{"dtype":"U8","shape":[4]}',
        '"a":7',
    ],
)
def test_a_header_that_lies_is_refused(store: Store, entry: str) -> None:
    text = f"{{{entry}}}".encode()
    ref = store.put("lies", [len(text).to_bytes(8, "little"), text, b"1234"])
    with pytest.raises(BlobCorrupt, match="lies"):
        tensors.read(store, ref)


def some_experts(store: Store, dtype: Any = np.uint8, layers: int = 3, topk: int = 2) -> tuple[Experts, np.ndarray]:
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
def test_rows_are_read_by_position_whatever_came_between(store: Store, dtype: Any) -> None:
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


@pytest.mark.parametrize("layers", [slice(1, 3), [2, 0], [1], slice(0, 0)])
def test_a_reader_takes_the_layers_it_needs(store: Store, layers: Any) -> None:
    experts, rows = some_experts(store)
    out = np.empty((2, len(np.arange(3)[layers]), 2), np.uint8)
    experts.read(0, 3, 5, out, layers=layers, missing="dummy")
    np.testing.assert_array_equal(out, rows[5:7, layers])


def test_a_dummy_route_names_distinct_experts(store: Store) -> None:
    experts, _ = some_experts(store)
    out = np.empty((1, 3, 2), np.int16)
    experts.read(0, 5, 6, out, missing="dummy")
    assert out.tolist() == [[[0, 1]] * 3]


@pytest.mark.parametrize(
    ("rows", "out", "missing"), [(np.uint8, np.uint8, -1), (np.uint16, np.int16, 0), (np.uint16, np.uint8, 0)]
)
def test_an_array_that_cannot_hold_the_rows_is_refused(store: Store, rows: Any, out: Any, missing: Any) -> None:
    experts, _ = some_experts(store, rows)
    with pytest.raises(StageError, match="cannot hold"):
        experts.read(0, 0, 1, np.empty((1, 3, 2), out), missing=missing)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_official_reader_opens_experts(store: Store, dtype: Any) -> None:
    _, rows = some_experts(store, dtype)
    with safe_open(store.root / "experts", framework="np") as file:
        np.testing.assert_array_equal(file.get_tensor("rows"), rows)
        assert file.get_tensor("chunks").tolist() == [[0, 0, 3], [1, 0, 2], [0, 3, 2]]
        assert file.metadata() == {"format": "penstock.experts.1", "rollout": "r7", "attempt": "1"}
    assert (store.root / "experts").read_bytes()[HEAD:].startswith(rows.tobytes())


def test_a_part_without_all_its_rows_is_not_sealed(store: Store) -> None:
    part = store.part("experts", reserve_head=True)
    with pytest.raises(StageError, match="0 bytes for 2 rows"):
        seal_experts(
            store, "experts", part, chunks=[Chunk(sample=0, first=0, rows=2)], routed_valid=np.ones(2, np.uint8),
            row=(1, 1), dtype=np.dtype(np.uint8), rollout="r", attempt=1,
        )  # fmt: skip


BARE = """
import sys
class Bare:
    allowed = {"numpy", "safetensors", "xxhash", "_xxhash", "penstock", *sys.stdlib_module_names}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.allowed:
            raise ImportError(f"{name} is not there in a bare environment")
sys.meta_path.insert(0, Bare())
import penstock.blobs.columns, penstock.blobs.experts
"""


def test_blobs_need_numpy_safetensors_and_xxhash_only() -> None:
    run = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
