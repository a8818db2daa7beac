import base64
import itertools
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.rollouts import MadeRollout, MadeTurn, RolloutMaker, encode_all, plan_of, seal
from support.stores import directory_store

from headpond.batches import BatchReader, prime_rl
from headpond.batches.plan import Format, PackingRules
from headpond.batches.prime_rl import array_header, binary_header
from headpond.batches.prime_rl_directory import publish_prime_rl
from headpond.batches.writer import encode_rank
from headpond.errors import BatchError, BlobCorrupt, StageError
from headpond.fields import TrainerField
from headpond.store import BlobRef
from headpond.store.files import FileStore

VECTORS = Path(__file__).parents[2] / "vectors"


class RoutedExperts(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    data: bytes
    shape: list[int]
    dtype: str

    def rows(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class MicroBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What prime-rl reads at 559b447 (2026-08)."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None
    routed_experts: RoutedExperts | None
    mm_kwargs: None
    mm_token_type_ids: None
    rl_weights: list[float] | None
    ce_weights: list[float] | None
    ref_kl_weights: list[float] | None


def vector_experts(routed: dict[str, Any] | None) -> prime_rl.ExpertRows | None:
    if routed is None:
        return None
    rows = np.frombuffer(base64.b64decode(routed["data"]), routed["dtype"])
    return prime_rl.ExpertRows(shape=tuple(routed["shape"]), dtype=rows.dtype, rows=iter(np.array_split(rows, 3)))


def test_micro_batches_have_the_bytes_of_prime_rls_encoder() -> None:
    batches = json.loads((VECTORS / "prime_rl_rank_0.json").read_text())
    written = array_header(len(batches))
    for batch in batches:
        tokens = {name: np.array(batch[name]) for name in ("input_ids", "loss_mask", "advantages", "position_ids")}
        tokens |= {"logprobs": np.array(batch["inference_logprobs"]), "temperatures": np.array(batch["temperatures"])}
        assert batch["sequence_lengths"] == batch["seq_lens"]
        pieces = prime_rl.encode_micro_batch(
            tokens,
            lengths=np.array(batch["seq_lens"]),
            envs=[(name, len(list(run))) for name, run in itertools.groupby(batch["env_names"])],
            experts=vector_experts(batch["routed_experts"]),
        )
        written += b"".join(map(bytes, pieces))
    assert written == (VECTORS / "prime_rl_rank_0.bin").read_bytes()


@pytest.mark.parametrize("length", [0, 1, 15, 16, 255, 256, 65_535, 65_536])
def test_headers_equal_those_of_values_encoded_at_once(length: int) -> None:
    assert array_header(length) + bytes(length) == msgspec.msgpack.encode([0] * length)
    assert binary_header(length) + bytes(length) == msgspec.msgpack.encode(bytes(length))


def test_experts_that_exceed_one_binary_value_are_refused() -> None:
    with pytest.raises(StageError, match=r"4 GiB .*batch.seq_len"):
        binary_header(2**32)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return directory_store(tmp_path / "store")


def made_rollouts(store: FileStore, *, experts: str | None = "uint8") -> list[MadeRollout]:
    maker = RolloutMaker(store=store, experts=experts)
    long, short = MadeTurn(context=7, completion=20, temperature=0.5), MadeTurn(context=2, completion=3)
    return [
        maker.make("a", [[long, short], [short]]),
        maker.make("b", [[short, short, short]], group="h", masked=True),
        maker.make("c", [[long, long, long]]),
        RolloutMaker(store=store).make("d", [[short]]),
    ]


def decoded(store: FileStore, ref: BlobRef, kind: Any) -> Any:
    return msgspec.msgpack.decode(store.open(ref).tobytes(), type=kind)


@pytest.mark.parametrize("experts", ["uint8", "uint16", None])
def test_a_prime_rl_rank_holds_the_same_values_as_the_native_batch(store: FileStore, experts: str | None) -> None:
    made = made_rollouts(store, experts=experts)
    native = plan_of(made, data_ranks=2, pad_id=1)
    seal(store, native)
    plan = plan_of(made, data_ranks=2, format="prime-rl")
    for rank in range(2):
        file = encode_rank(store, plan, data_rank=rank, execution="p").file
        batches = decoded(store, file, list[MicroBatch])
        expected = list(next(BatchReader(store.root.parent, data_rank=rank, data_ranks=2)).micro_batches())
        assert len(batches) == len(expected)
        for batch, other in zip(batches, expected, strict=True):
            assert batch.input_ids == other.input_ids.tolist()
            replayed = [experts is None or native.rollouts[n].experts is not None for n in other.samples.rollout_index]
            padding = [True] * (other.cu_seqlens.size - 1 - len(replayed))
            kept = np.repeat(np.array([*replayed, *padding], bool), np.diff(other.cu_seqlens))
            assert batch.loss_mask == ((other.loss_mask == 1) & kept).tolist(), "without routes, no loss"
            assert batch.advantages == other.advantages.tolist()
            assert batch.inference_logprobs == other.logprobs.tolist()
            assert batch.position_ids == other.position_ids.tolist()
            assert batch.temperatures == other.temperatures.tolist()
            assert sum(batch.seq_lens) == len(batch.input_ids) == len(batch.env_names)
            assert batch.sequence_lengths == batch.seq_lens
            samples = len(other.samples)
            assert batch.seq_lens[:-1] == np.diff(other.cu_seqlens)[: samples - 1].tolist()
            envs = [native.envs[index] for index in other.samples.env_index]
            runs = zip([*envs, ""], np.diff([*other.cu_seqlens[: samples + 1], len(batch.input_ids)]), strict=True)
            assert batch.env_names == [name for name, count in runs for _ in range(count)]
            if batch.routed_experts is None:
                assert experts is None
            else:
                assert batch.routed_experts.dtype == {"uint8": "uint8", "uint16": "int16"}[str(experts)]
                np.testing.assert_array_equal(batch.routed_experts.rows(), other.routed_experts(missing=0))


def test_prime_rl_gets_the_fields_that_it_has(store: FileStore) -> None:
    fields = [TrainerField(name=name, default=0.5) for name in ("ref_logprobs", "rl_weights", "ref_kl_weights")]
    turn = MadeTurn(context=2, completion=3)
    made = [
        RolloutMaker(store=store, fields=fields).make("a", [[turn]]),
        RolloutMaker(store=store).make("b", [[turn]]),
    ]
    [rank] = encode_all(store, plan_of(made, fields=tuple(fields), format="prime-rl"))
    [batch] = decoded(store, rank.file, list[MicroBatch])
    given = made[0].columns.token_fields
    for name in given:
        assert getattr(batch, name) == [*given[name].tolist(), *[0.5] * 5, *[0.0] * 6], "padding is 0"
    assert batch.ce_weights is None


def test_any_order_of_arrival_gives_the_same_file(store: FileStore) -> None:
    made = made_rollouts(store)
    plans = [plan_of(order, data_ranks=2, format="prime-rl") for order in (made, made[::-1])]
    assert encode_all(store, plans[0]) == encode_all(store, plans[1])


def test_the_batch_reader_refuses_prime_rl_files(store: FileStore) -> None:
    seal(store, plan_of(made_rollouts(store), format="prime-rl"))
    with pytest.raises(BatchError, match='this run writes format = "prime-rl"'):
        next(BatchReader(store.root.parent, data_rank=0, data_ranks=1))


def test_a_damaged_file_is_not_published(store: FileStore, tmp_path: Path) -> None:
    manifest = seal(store, plan_of(made_rollouts(store), format="prime-rl"))
    path = store.path(manifest.ranks[0].file.key)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BlobCorrupt, match=r"rank_00\.x\.bin"):
        publish_prime_rl(store, manifest, tmp_path / "out")


@pytest.mark.parametrize("form", ["native", "prime-rl"])
def test_rollouts_jsonl_has_one_line_per_rollout_with_its_advantage(store: FileStore, form: Format) -> None:
    made = made_rollouts(store)
    rank, *others = encode_all(store, plan_of(made, data_ranks=2, format=form))
    assert rank.rollouts_jsonl is not None
    assert not any(other.rollouts_jsonl for other in others), "once a step"
    lines = [json.loads(line) for line in store.open(rank.rollouts_jsonl).tobytes().splitlines()]
    assert [line["rollout"] for line in lines] == ["a", "b", "c", "d"]
    for line, each in zip(lines, made, strict=True):
        assert (line["advantage"], line["reward"]) == (each.planned.advantage, each.planned.reward)
        assert line["conversation"] == [{"content": each.planned.rollout}]
        assert line["metrics"] == dict(each.columns.metrics)


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", ["native", "prime-rl"])
def test_memory_does_not_grow_with_the_batch(store: FileStore, form: Format) -> None:
    maker = RolloutMaker(store=store, experts="uint8", layers=16)
    made = [maker.make(f"r{number:03d}", [[MadeTurn(context=400, completion=3696)]]) for number in range(32)]

    def encoded(rollouts: list[MadeRollout], attempt: int) -> int:
        plan = plan_of(rollouts, format=form, rules=PackingRules(data_ranks=1, seq_len=8192))
        return peak_bytes(lambda: encode_all(store, plan, execution=f"{len(rollouts)}-{attempt}"))

    # Threads that earlier tests left in this process may allocate meanwhile: once in hundreds of runs.
    assert any(encoded(made, attempt) < 1.25 * encoded(made[:8], attempt) for attempt in range(3))
