"""A reader's view of the routed experts, which stay in the rollouts' files."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from support.rollouts import MadeRollout, MadeTurn, RolloutMaker, plan_of, seal
from support.stores import directory_store

from headpond.batches import BatchReader, MicroBatch
from headpond.errors import BatchError, BlobCorrupt, BlobMissing
from headpond.store.experts import Missing
from headpond.store.files import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return directory_store(tmp_path / "store")


def sealed(store: FileStore, *, experts: str | None = "uint8", data_ranks: int = 2) -> list[MadeRollout]:
    maker = RolloutMaker(store=store, experts=experts)
    turn = MadeTurn(context=3, completion=8)
    made = [maker.make("a", [[turn, turn], [turn]]), maker.make("b", [[turn] * 3]), maker.make("c", [[turn] * 7])]
    seal(store, plan_of(made, data_ranks=data_ranks))
    return made


def micro_batches(store: FileStore, *, data_ranks: int = 2) -> list[MicroBatch]:
    readers = [
        BatchReader(store.root.parent, data_rank=rank, data_ranks=data_ranks, timeout_s=0) for rank in range(data_ranks)
    ]
    return [batch for reader in readers for batch in next(reader).micro_batches()]


@pytest.mark.parametrize(
    ("missing", "dtypes"),
    [(-1, {"uint8": "int16", "uint16": "int32"}), (0, {}), ("dummy", {})],
)
@pytest.mark.parametrize("experts", ["uint8", "uint16"])
def test_rows_are_at_their_tokens_and_gaps_hold_the_missing_value(
    store: FileStore, experts: str, missing: Missing, dtypes: dict[str, str]
) -> None:
    made = sealed(store, experts=experts)
    filling = np.arange(3) if missing == "dummy" else missing
    for batch in micro_batches(store):
        rows, valid = batch.routed_experts(missing=missing), batch.routed_valid()
        assert rows.dtype == dtypes.get(experts, experts)
        assert rows.shape == (batch.input_ids.size, 2, 3)
        expected = np.broadcast_to(filling, rows.shape).copy()
        known = np.zeros(batch.input_ids.size, np.uint8)
        spans = itertools.islice(itertools.pairwise(batch.cu_seqlens), batch.samples.reward.size)
        for index, (start, stop) in enumerate(spans):
            rollout, sample = made[batch.samples.rollout_index[index]], int(batch.samples.sample_in_rollout[index])
            sent = rollout.valid[sample][: stop - start]
            known[start:stop] = sent
            expected[start:stop][sent] = rollout.rows[sample][: stop - start][sent]
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(valid, known)
        assert not valid.all(), "the last token of a sample was never fed forward"


@pytest.mark.parametrize("layers", [slice(1, 2), [1], [1, 0]])
def test_a_pipeline_stage_reads_its_own_layers(store: FileStore, layers: slice | list[int]) -> None:
    sealed(store)
    for batch in micro_batches(store):
        np.testing.assert_array_equal(batch.routed_experts(layers=layers), batch.routed_experts()[:, layers])


def test_a_rank_without_samples_gets_rows_of_the_same_shape(store: FileStore) -> None:
    made = RolloutMaker(store=store, experts="uint16").make("a", [[MadeTurn(context=1, completion=1)]])
    seal(store, plan_of([made], data_ranks=2))
    _, filler = micro_batches(store)
    rows = filler.routed_experts()
    assert (rows.shape, rows.dtype) == ((8, 2, 3), np.dtype("int32"))
    assert (rows == -1).all()
    assert not filler.routed_valid().any()


def test_a_rollout_without_experts_holds_the_missing_value(store: FileStore) -> None:
    turn = MadeTurn(context=2, completion=2)
    made = [
        RolloutMaker(store=store, experts="uint8").make("a", [[turn]]),
        RolloutMaker(store=store).make("b", [[turn]]),
    ]
    seal(store, plan_of(made))
    [batch] = micro_batches(store, data_ranks=1)
    assert (batch.routed_experts()[4:] == -1).all()
    assert batch.routed_valid()[4:].tolist() == [0] * 4


def test_routed_experts_of_a_batch_without_any_are_refused(store: FileStore) -> None:
    sealed(store, experts=None)
    with pytest.raises(BatchError, match=r"step 0 .*routed experts"):
        micro_batches(store)[0].routed_experts()


def test_experts_of_different_shapes_in_one_batch_are_refused(store: FileStore) -> None:
    turn = MadeTurn(context=2, completion=2)
    made = [
        RolloutMaker(store=store, experts="uint8", layers=layers).make(name, [[turn]])
        for name, layers in [("a", 2), ("b", 4)]
    ]
    seal(store, plan_of(made))
    with pytest.raises(BatchError, match="rollouts/b/experts holds experts of"):
        micro_batches(store, data_ranks=1)[0].routed_experts()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damaged_experts_are_named_by_their_key(store: FileStore, damage: str) -> None:
    sealed(store)
    path = store.path("rollouts/b/experts")
    content = bytearray(path.read_bytes())
    content[4100] ^= 1
    match damage:
        case "flipped":
            path.write_bytes(content)
        case "truncated":
            path.write_bytes(content[:-1])
        case _:
            path.unlink()
    with pytest.raises(BlobMissing if damage == "missing" else BlobCorrupt, match="rollouts/b/experts"):
        _ = [batch.routed_experts() for batch in micro_batches(store)]
