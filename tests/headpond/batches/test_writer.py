import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from support.rollouts import MadeRollout, MadeTurn, RolloutMaker, encode_all, plan_of, seal
from support.stores import blob_keys, directory_store

from headpond.batches import Batch, BatchPlan, BatchReader, MicroBatch
from headpond.batches.assembly import Assembly
from headpond.batches.manifest import TOKEN_COLUMNS
from headpond.batches.plan import PackingRules
from headpond.errors import BatchError, StageError
from headpond.fields import TrainerField
from headpond.store import tensors
from headpond.store.columns import read_columns, write_columns
from headpond.store.files import FileStore

FIELDS = (
    TrainerField(name="ref_logprobs"),
    TrainerField(name="level", per="sample", dtype="i32"),
    TrainerField(name="tag", dtype="u8", default=9),
)
WEIGHTS = TrainerField(name="weights", default=0.5)

turns = st.builds(
    MadeTurn,
    context=st.integers(1, 20),
    completion=st.integers(0, 20),
    version=st.integers(0, 9),
    temperature=st.sampled_from([0.5, 1.0]),
)
samples = st.lists(st.lists(turns, min_size=1, max_size=3), max_size=3)
rollout_lists = st.lists(samples, max_size=6)
rules_strategy = st.builds(
    PackingRules,
    data_ranks=st.integers(1, 4),
    seq_len=st.just(64),
    pad_to_multiple_of=st.sampled_from([1, 16]),
    oversize=st.sampled_from(["cut", "mask", "drop"]),
    attention_cost=st.sampled_from([0.0, 0.1]),
)

files_written = settings(max_examples=30)
MEMORY = Path("/dev/shm")  # where a sync costs nothing


@contextmanager
def new_store() -> Iterator[FileStore]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        yield directory_store(Path(directory) / "store")


def made_rollouts(store: FileStore, rollouts: list[Any], *, experts: str | None = None) -> list[MadeRollout]:
    maker = RolloutMaker(store=store, experts=experts, fields=FIELDS)
    return [
        maker.make(f"r{number:03d}", samples, group=f"g{number % 2}", masked=number == 3)
        for number, samples in enumerate(rollouts)
    ]


def read_ranks(store: FileStore, plan: BatchPlan) -> list[list[MicroBatch]]:
    ranks = plan.rules.data_ranks
    before = plan.step - 1
    readers = [
        BatchReader(store.root.parent, data_rank=rank, data_ranks=ranks, resume_step=before, timeout_s=0)
        for rank in range(ranks)
    ]
    return [list(next(reader).micro_batches()) for reader in readers]


def bounds(batch: MicroBatch) -> list[tuple[int, int]]:
    return list(itertools.pairwise(batch.cu_seqlens.tolist()))


def expected_tokens(made: MadeRollout, sample: int, plan: BatchPlan) -> dict[str, list[float]]:
    """The expected columns, token by token from the turns. Loss weights have a test of their own."""
    columns, where = made.columns, made.columns.sample(sample)
    length = min(where.stop - where.start, plan.rules.seq_len)
    masked = made.planned.masked or (plan.rules.oversize == "mask" and where.stop - where.start > length)
    expected: dict[str, list[float]] = {}
    for position in range(length):
        token = where.start + position
        turn = min(
            n
            for n in range(columns.turns.end.size)
            if columns.turns.sample[n] == sample and token < columns.turns.end[n]
        )
        values = {
            "input_ids": columns.input_ids[token],
            "position_ids": position,
            "loss_mask": 0 if masked else columns.loss_mask[token],
            "logprobs": columns.logprobs[token],
            "advantages": np.float32(made.planned.advantage),
            "temperatures": columns.turns.temperature[turn],
            "versions": columns.turns.version_first[turn] if token >= columns.turns.start[turn] else -1,
            "version_exact": columns.turns.version_exact[turn] if token >= columns.turns.start[turn] else 0,
            "tag": columns.token_fields["tag"][token],
            "ref_logprobs": columns.token_fields["ref_logprobs"][token],
        }
        for name, value in values.items():
            expected.setdefault(name, []).append(value)
    return expected


@files_written
@given(rollout_lists, rules_strategy)
def test_a_batch_read_back_equals_its_rollouts(rollouts: list[Any], rules: PackingRules) -> None:
    with new_store() as store:
        made = made_rollouts(store, rollouts)
        plan = plan_of(made, rules=rules, fields=FIELDS)
        manifest = seal(store, plan)
        delivered: set[tuple[int, int]] = set()
        for batch in itertools.chain.from_iterable(read_ranks(store, plan)):
            for index, (start, stop) in enumerate(bounds(batch)[: batch.samples.reward.size]):
                rollout, sample = int(batch.samples.rollout_index[index]), int(batch.samples.sample_in_rollout[index])
                expected = expected_tokens(made[rollout], sample, plan)
                columns = {name: getattr(batch, name, None) for name in expected} | batch.fields
                level = columns.pop("level")[index]
                assert level == made[rollout].columns.sample_fields["level"][sample]
                assert (level.dtype, columns["tag"].dtype) == (np.int32, np.uint8)
                assert {name: column[start:stop].tolist() for name, column in columns.items()} == expected
                delivered.add((rollout, sample))
        kept = {
            (rollout, sample)
            for rollout, each in enumerate(made)
            for sample, length in enumerate(each.planned.sample_lengths)
            if length <= 64 or rules.oversize != "drop"
        }
        assert delivered == kept
        assert manifest.totals.samples == len(kept)


@files_written
@given(rollout_lists, rules_strategy)
def test_padding_and_fillers_are_outside_the_loss(rollouts: list[Any], rules: PackingRules) -> None:
    with new_store() as store:
        plan = plan_of(made_rollouts(store, rollouts), rules=rules, fields=FIELDS, pad_id=7)
        manifest = seal(store, plan)
        ranks = read_ranks(store, plan)
        assert len({len(rank) for rank in ranks}) == 1
        for batch in itertools.chain.from_iterable(ranks):
            lengths = np.diff(batch.cu_seqlens)
            assert batch.cu_seqlens[0] == 0
            assert batch.max_seqlen == lengths.max()
            assert batch.input_ids.size == batch.cu_seqlens[-1] <= 64
            assert batch.input_ids.size % rules.pad_to_multiple_of == 0
            assert lengths.size - batch.samples.reward.size in (0, 1), "padding is one segment"
            for start, stop in bounds(batch)[batch.samples.reward.size :]:
                assert batch.position_ids[start:stop].tolist() == list(range(stop - start))
                assert set(batch.input_ids[start:stop].tolist()) == {7}
                assert set(batch.versions[start:stop].tolist()) == {-1}
                assert set(batch.temperatures[start:stop].tolist()) == {1.0}
                for column in (batch.loss_mask, batch.loss_weights, batch.advantages, batch.fields["ref_logprobs"]):
                    assert not column[start:stop].any()
                assert set(batch.fields["tag"][start:stop].tolist()) == {9}, "the declared default"
        batches = list(itertools.chain.from_iterable(ranks))
        assert manifest.totals.loss_tokens == sum(int(batch.loss_mask.sum()) for batch in batches)
        assert manifest.totals.tokens == sum(int(batch.cu_seqlens[batch.samples.reward.size]) for batch in batches)


@files_written
@given(rollout_lists, rules_strategy, st.randoms(use_true_random=False))
def test_any_order_of_arrival_gives_the_same_bytes(rollouts: list[Any], rules: PackingRules, random: Any) -> None:
    with new_store() as store:
        made = made_rollouts(store, rollouts)
        plan = plan_of(made, rules=rules, fields=FIELDS)
        other = plan_of(random.sample(made, len(made)), rules=rules, fields=FIELDS)
        assert encode_all(store, plan) == encode_all(store, other), "sizes and checksums included"


def mean_loss(made: list[MadeRollout], normalise: str, loss: dict[int, float]) -> float:
    """The mean that `normalise` names. A masked rollout counts with a loss of 0."""
    sums: list[list[float]] = []
    counts: list[list[int]] = []
    for each in made:
        masks = [each.columns.loss_mask[each.columns.sample(n)] for n in range(len(each.planned.sample_lengths))]
        ids = [each.columns.input_ids[each.columns.sample(n)] for n in range(len(masks))]
        trained = [[] if each.planned.masked else row[mask == 1].tolist() for row, mask in zip(ids, masks, strict=True)]
        sums.append([sum(loss[token] for token in row) for row in trained])
        counts.append([len(row) for row in trained])
    total = sum(map(sum, sums))
    match normalise:
        case "token":
            return total / max(1, sum(map(sum, counts)))
        case "sample":
            pairs = [
                (s, n) for row, numbers in zip(sums, counts, strict=True) for s, n in zip(row, numbers, strict=True)
            ]
            return sum(s / max(1, n) for s, n in pairs) / max(1, len(pairs))
        case "rollout":
            return sum(sum(s) / max(1, sum(n)) for s, n in zip(sums, counts, strict=True)) / max(1, len(made))
        case _:
            return total / 8 / max(1, len(made))


@files_written
@given(rollout_lists, st.sampled_from(["token", "sample", "rollout", "constant:8"]))
def test_the_weighted_loss_depends_on_neither_ranks_nor_packing_nor_order(rollouts: list[Any], normalise: str) -> None:
    with new_store() as store:
        made = made_rollouts(store, rollouts)
        loss = {token: float(np.sin(token)) for each in made for token in each.columns.input_ids.tolist()}
        for step, (ranks, seq_len, multiple) in enumerate([(1, 256, 1), (3, 256, 1), (2, 192, 16)]):
            rules = PackingRules(data_ranks=ranks, seq_len=seq_len, pad_to_multiple_of=multiple)
            in_order = made if step % 2 else made[::-1]
            plan = plan_of(in_order, step=step, rules=rules, normalise=normalise, fields=FIELDS)
            manifest = seal(store, plan)
            total = sum(
                float(weight) * loss[int(token)]
                for batch in itertools.chain.from_iterable(read_ranks(store, plan))
                for token, weight in zip(batch.input_ids, batch.loss_weights, strict=True)
                if weight
            )
            expected = mean_loss(made, normalise, loss)
            assert total / manifest.totals.denominator == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_per_sample_columns_identify_the_rollout_of_each_sample(tmp_path: Path) -> None:
    store = directory_store(tmp_path / "store")
    maker = RolloutMaker(store=store)
    two = maker.make(
        "b", [[MadeTurn(context=2, completion=9, version=4)], [MadeTurn(context=3, completion=2, version=6)]]
    )
    one = maker.make(
        "a", [[MadeTurn(context=1, completion=1), MadeTurn(context=2, completion=2, version=5)]], group="h"
    )
    plan = plan_of([two, one])
    seal(store, plan)
    [[batch]] = read_ranks(store, plan)
    rows = batch.samples
    assert plan.groups == ("g", "h")
    assert plan.envs == ("env-g", "env-h")
    assert np.diff(batch.cu_seqlens).tolist() == [11, 6, 5, 2], "longest first, then the padding"
    assert rows.rollout_index.tolist() == [1, 0, 1], "a comes before b"
    assert rows.group_index.tolist() == rows.env_index.tolist() == [0, 1, 0]
    assert rows.sample_in_rollout.tolist() == [0, 0, 1]
    assert rows.parent.tolist() == [-1, -1, 0]
    assert rows.agent.tolist() == [0, 0, 0]
    assert rows.rollout_offset.tolist() == [0, 0, 11]
    assert rows.version_first.tolist() == [4, 3, 6]
    assert rows.version_last.tolist() == [5, 6, 7]
    per_sample = [
        int(two.columns.loss_mask[:11].sum()),
        int(one.columns.loss_mask.sum()),
        int(two.columns.loss_mask[11:].sum()),
    ]
    assert rows.loss_tokens.tolist() == per_sample
    assert rows.rollout_loss_tokens.tolist() == [
        sum(per_sample) - per_sample[1],
        per_sample[1],
        sum(per_sample) - per_sample[1],
    ]
    assert rows.truncated.tolist() == [two.columns.truncated[0], one.columns.truncated[0], two.columns.truncated[1]]
    np.testing.assert_array_equal(rows.reward, np.float32([two.planned.reward, one.planned.reward, two.planned.reward]))


def test_a_rollout_without_a_field_has_its_default(tmp_path: Path) -> None:
    store = directory_store(tmp_path / "store")
    level = TrainerField(name="level", per="sample", dtype="i64", default=-1)
    made = [
        RolloutMaker(store=store, fields=[WEIGHTS, level]).make("a", [[MadeTurn(context=2, completion=2)]]),
        RolloutMaker(store=store).make("b", [[MadeTurn(context=2, completion=1)]]),
    ]
    plan = plan_of(made, fields=(WEIGHTS, level))
    seal(store, plan)
    [[batch]] = read_ranks(store, plan)
    weights = batch.fields["weights"]
    np.testing.assert_array_equal(weights[:4], made[0].columns.token_fields["weights"])
    assert weights[4:].tolist() == [0.5] * 4, "the other rollout and the padding"
    assert batch.fields["level"].tolist() == [made[0].columns.sample_fields["level"][0], -1]


def test_a_required_field_is_only_missing_from_rollouts_that_failed(tmp_path: Path) -> None:
    store = directory_store(tmp_path / "store")
    required = TrainerField(name="weights", default=None)
    made = RolloutMaker(store=store).make("a", [[MadeTurn(context=2, completion=2)]])
    with pytest.raises(StageError, match=r"rollout a .*'weights'.* batch.fields.w"):
        encode_all(store, plan_of([made], fields=(required,)))
    columns = write_columns(store, "failed", dataclasses.replace(made.columns, error="timeout"))
    plan = plan_of([made], rollouts=(dataclasses.replace(made.planned, columns=columns),), fields=(required,))
    seal(store, plan)
    [[batch]] = read_ranks(store, plan)
    assert not batch.fields["weights"].any()


def test_a_rank_file_opens_with_the_official_reader(tmp_path: Path) -> None:
    store = directory_store(tmp_path / "store")
    plan = plan_of([RolloutMaker(store=store).make("a", [[MadeTurn(context=2, completion=2)]])])
    [rank] = seal(store, plan).ranks
    [[batch]] = read_ranks(store, plan)
    arrays = load_file(store.path(rank.file.key))
    for name in TOKEN_COLUMNS:
        np.testing.assert_array_equal(arrays[name], getattr(batch, name))


def test_a_step_without_rollouts_is_sealed_and_read(tmp_path: Path) -> None:
    store = directory_store(tmp_path / "store")
    plan = plan_of([], data_ranks=3)
    assert seal(store, plan).totals.denominator == 1
    assert read_ranks(store, plan) == [[], [], []]


def test_ranks_without_samples_get_padding_only(tmp_path: Path) -> None:
    store = directory_store(tmp_path / "store")
    plan = plan_of([RolloutMaker(store=store).make("a", [[MadeTurn(context=2, completion=2)]])], data_ranks=4)
    seal(store, plan)
    ranks = read_ranks(store, plan)
    assert [batch.samples.reward.size for [batch] in ranks] == [1, 0, 0, 0]
    assert [batch.cu_seqlens.tolist() for [batch] in ranks[1:]] == [[0, 8]] * 3
    assert not any(batch.loss_weights.any() for [batch] in ranks[1:])


def test_rollout_files_that_contradict_the_plan_are_refused(tmp_path: Path) -> None:
    store = directory_store(tmp_path / "store")
    made = RolloutMaker(store=store, fields=[WEIGHTS]).make("a", [[MadeTurn(context=2, completion=2)]])
    longer = dataclasses.replace(made.planned, sample_lengths=(5,))
    for plan, reason in [
        (
            plan_of([made], fields=(dataclasses.replace(WEIGHTS, dtype="i32"),)),
            "has float32 in field 'weights', declared as i32",
        ),
        (plan_of([made], fields=(WEIGHTS,), logprobs_mode="raw"), "has processed logprobs, the plan has raw"),
        (
            plan_of([made], fields=(WEIGHTS,), rollouts=(longer,)),
            r"has samples of \(4,\) tokens, the plan has \(5,\)",
        ),
    ]:
        with pytest.raises(StageError, match=reason):
            encode_all(store, plan)
    assert blob_keys(store, "batches") == [], "nothing half-written is left"
    assert not list((store.root / "batches").rglob("*.*"))
    with pytest.raises(StageError, match="rollout a is twice"):
        plan_of([made, made])


def test_torch_returns_tensors_if_torch_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = directory_store(tmp_path / "store")
    made = RolloutMaker(store=store, fields=[WEIGHTS]).make("a", [[MadeTurn(context=2, completion=2)]])
    plan = plan_of([made], fields=(WEIGHTS,))
    seal(store, plan)
    [[batch]] = read_ranks(store, plan)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BatchError, match="torch is not installed here"):
        batch.torch()

    stand_in = SimpleNamespace(from_numpy=lambda array: ("tensor", array.flags.writeable, array.tolist()))
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    tensors = batch.torch()
    assert tensors["input_ids"] == ("tensor", True, batch.input_ids.tolist()), "torch must not share a read-only map"
    assert tensors.keys() == {*TOKEN_COLUMNS, "cu_seqlens", "weights"}


def test_a_token_has_the_version_that_the_engine_names_for_it(tmp_path: Path) -> None:
    """Two turns in one sample: the first of one version, the second of two, of which a part is cut off."""
    store = directory_store(tmp_path)
    maker = RolloutMaker(store=store, seed=1)
    turns = [MadeTurn(context=2, completion=3, version=5), MadeTurn(context=1, completion=4, version=5)]
    made = maker.make("r1", [turns])
    columns = dataclasses.replace(
        read_columns(store, made.planned.columns),
        span_turn=np.array([1, 1, 1], np.int32),
        span_start=np.array([6, 7, 9], np.int64),
        span_version=np.array([5, 6, 8], np.int32),
    )
    planned = dataclasses.replace(
        made.planned, columns=write_columns(store, "rollouts/split/columns.safetensors", columns)
    )
    plan = BatchPlan(step=0, rules=PackingRules(data_ranks=1, seq_len=9, oversize="cut"), rollouts=(planned,))
    sample = Assembly(store, plan).sample(0)
    assert sample.tokens["versions"].tolist() == [-1, -1, 5, 5, 5, -1, 5, 6, 6]
    assert sample.tokens["version_exact"].tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 1]


def test_a_rank_file_of_an_earlier_release_has_no_exact_versions(tmp_path: Path) -> None:
    store = directory_store(tmp_path)
    plan = plan_of([RolloutMaker(store=store, seed=1).make("r1", [[MadeTurn(context=2, completion=3)]])])
    manifest = seal(store, plan)
    file = tensors.read(store, manifest.ranks[0].file)
    arrays = {name: array for name, array in file.arrays.items() if name != "version_exact"}
    older = tensors.write(store, f"{plan.directory}/older.safetensors", arrays, file.metadata)
    rank = dataclasses.replace(manifest.ranks[0], file=older)
    (mb,) = Batch(store, dataclasses.replace(manifest, ranks=(rank,)), 0).micro_batches()
    assert mb.versions.max() == 3
    assert mb.version_exact.tolist() == [0] * mb.input_ids.size
