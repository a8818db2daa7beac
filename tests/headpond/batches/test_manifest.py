import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from support.rollouts import MadeTurn, RolloutMaker, encode_all, plan_of
from support.stores import directory_store, manifest_path

from headpond.batches import BatchPlan, EncodedRank, read_manifest, seal_manifest
from headpond.errors import BatchError, BlobCorrupt, BlobUnwritten, StageError
from headpond.store.files import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return directory_store(tmp_path / "store")


@pytest.fixture
def plan(store: FileStore) -> BatchPlan:
    maker = RolloutMaker(store=store, experts="uint8")
    samples = [[MadeTurn(context=2, completion=30)], [MadeTurn(context=3, completion=80)]]
    made = [maker.make(name, samples, group=name[0]) for name in ("x1", "y1", "x2")]
    return plan_of(made, step=42, data_ranks=2)


def test_a_sealed_step_is_read_back_with_its_totals(store: FileStore, plan: BatchPlan) -> None:
    assert read_manifest(store, 42) is None
    sealed = seal_manifest(store, plan, reversed(encode_all(store, plan, execution="e1")))
    assert read_manifest(store, 42) == sealed
    assert [rank.file.key for rank in sealed.ranks] == [
        "batches/step_000042/rank_00.e1.safetensors",
        "batches/step_000042/rank_01.e1.safetensors",
    ]
    totals = sealed.totals
    assert (totals.samples, totals.rollouts, totals.groups, totals.oversized) == (6, 3, 2, 3)
    assert totals.tokens == 3 * (32 + 64)
    assert totals.loss_tokens == totals.denominator == sum(rank.loss_tokens for rank in sealed.ranks) > 0


def test_a_manifest_lists_rollouts_files_and_versions(store: FileStore, plan: BatchPlan) -> None:
    seal_manifest(store, plan, encode_all(store, plan))
    content = json.loads(manifest_path(store, 42).read_text())
    first = content["plan"]["rollouts"][0]
    assert first["rollout"] == "x1"
    assert first["experts"]["key"] == "rollouts/x1/experts"
    assert {"checksum", "size", "key"} == first["columns"].keys()
    assert {"advantage", "reward", "version_first", "version_last", "masked"} <= first.keys()
    assert content["plan"]["logprobs_mode"] == "processed"


def test_a_sealed_step_is_never_replaced(store: FileStore, plan: BatchPlan) -> None:
    sealed = seal_manifest(store, plan, encode_all(store, plan, execution="e1"))
    before = manifest_path(store, 42).stat()
    assert seal_manifest(store, plan, encode_all(store, plan, execution="e1")) == sealed, "again changes nothing"
    with pytest.raises(BatchError, match="step 42 is sealed already"):
        seal_manifest(store, plan, encode_all(store, plan, execution="e2"))
    after = manifest_path(store, 42).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not [path for path in manifest_path(store, 42).parent.iterdir() if path.name.startswith(".")]


def test_sealing_needs_every_rank_encoded_from_this_plan(store: FileStore, plan: BatchPlan) -> None:
    ranks = encode_all(store, plan)
    with pytest.raises(StageError, match=r"ranks 0 to 1.* \[0\]"):
        seal_manifest(store, plan, ranks[:1])
    formed_again = replace(plan, rollouts=plan.rollouts[1:])
    with pytest.raises(StageError, match=r"settings.* batches/step_000042/rank_00"):
        seal_manifest(store, formed_again, ranks)
    assert read_manifest(store, 42) is None


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"format":"other"}', b"null", b'{"plan":' * 100_000])
def test_a_malformed_manifest_is_refused_with_its_path(store: FileStore, content: bytes) -> None:
    path = manifest_path(store, 42)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(BlobCorrupt, match=r"step_000042/manifest\.json is not a manifest"):
        read_manifest(store, 42)


def test_a_manifest_that_contradicts_itself_is_refused(store: FileStore, plan: BatchPlan) -> None:
    seal_manifest(store, plan, encode_all(store, plan))
    path = manifest_path(store, 42)
    path.write_text(path.read_text().replace('"rollout":"x1"', '"rollout":"x2"'))
    with pytest.raises(BlobCorrupt, match="rollout x2 is twice"):
        read_manifest(store, 42)


def test_a_manifest_of_another_step_is_refused(store: FileStore, plan: BatchPlan) -> None:
    seal_manifest(store, plan, encode_all(store, plan))
    manifest_path(store, 42).parent.rename(store.root / "batches/step_000043")
    with pytest.raises(BlobCorrupt, match=r"step_000043/manifest\.json .*step 42"):
        read_manifest(store, 43)


def test_encoding_into_an_unwritable_store_raises_blob_unwritten(store: FileStore, plan: BatchPlan) -> None:
    store.root.joinpath("batches").write_bytes(b"in the way")
    with pytest.raises(BlobUnwritten, match="cannot write"):
        encode_all(store, plan)


def test_a_rank_file_that_cannot_grow_is_removed(store: FileStore, plan: BatchPlan) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(BlobUnwritten, match="File too large; check free space"):
            encode_all(store, plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in store.root.joinpath("batches").rglob("*") if path.is_file()]


def test_integer_and_float_values_give_the_same_plan_digest(plan: BatchPlan) -> None:
    whole = [replace(each, reward=1.0, advantage=0.0) for each in plan.rollouts]
    same = [replace(each, reward=1, advantage=0) for each in plan.rollouts]
    rules = replace(plan.rules, token_cost=2)
    assert replace(plan, rollouts=tuple(whole)).digest == replace(plan, rollouts=tuple(same)).digest
    assert replace(plan, rules=rules).digest == replace(plan, rules=replace(plan.rules, token_cost=2.0)).digest
    assert plan.digest != replace(plan, rules=rules).digest


@pytest.mark.parametrize("name", ["reward", "advantage"])
def test_a_reward_or_advantage_that_is_not_finite_is_refused(plan: BatchPlan, name: str) -> None:
    with pytest.raises(StageError, match=f"rollout x1 has {name} nan"):
        replace(plan.rollouts[0], **{name: float("nan")})


def test_a_plan_and_an_encoded_rank_survive_json(store: FileStore, plan: BatchPlan) -> None:
    for kind, value in [(BatchPlan, plan), (EncodedRank, encode_all(store, plan)[0])]:
        adapter = TypeAdapter(kind)
        assert adapter.validate_json(adapter.dump_json(value)) == value
