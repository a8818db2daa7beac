"""Where prime-rl's trainer of each date looks, what it breaks on, and what it says of its progress."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.rollouts import MadeTurn, RolloutMaker, encode_all, plan_of, seal
from support.stores import directory_store

from headpond.batches.plan import Format, PackingRules
from headpond.batches.prime_rl_directory import (
    accept_broadcasts,
    publish_prime_rl,
    read_broadcasts,
    unpublish_prime_rl,
)
from headpond.batches.signals import NOTHING, PublishedPolicy
from headpond.config import RunConfig
from headpond.store.files import FileStore

TURN = MadeTurn(context=2, completion=3)
MICRO_BATCH_FORMATS: tuple[Format, ...] = ("prime-rl", "prime-rl-2026-08")


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return directory_store(tmp_path / "store")


def decoded(store: FileStore, plan: Any) -> list[Any]:
    ranks = encode_all(store, plan)
    return [msgspec.msgpack.decode(store.open(rank.file).tobytes()) for rank in ranks]


@pytest.mark.parametrize(
    ("form", "directory"),
    [
        ("prime-rl", "batches/step_4"),
        ("prime-rl-2026-08", "rollouts/step_4"),
    ],
)
def test_a_step_is_published_where_the_trainer_of_its_date_reads_it_and_removed_again(
    store: FileStore, tmp_path: Path, form: Format, directory: str
) -> None:
    made = [RolloutMaker(store=store).make(name, [[TURN]]) for name in "ab"]
    manifest = seal(store, plan_of(made, step=3, data_ranks=2, format=form))
    names = ["rank_0.bin", "rank_1.bin"]
    out, published = tmp_path / "out", tmp_path / "out" / directory
    for _ in range(2):  # again, as after a crash
        publish_prime_rl(store, manifest, out)
        assert sorted(path.name for path in published.iterdir()) == sorted([*names, "train_rollouts.jsonl"])
    for rank, name in zip(manifest.ranks, names, strict=True):
        assert (published / name).read_bytes() == store.open(rank.file).tobytes()
    for _ in range(2):
        unpublish_prime_rl(form, out, 3)
        assert not published.exists()


@pytest.mark.parametrize("form", MICRO_BATCH_FORMATS)
@pytest.mark.parametrize("experts", [None, "uint8"])
def test_a_filler_has_two_tokens_and_routes_if_the_step_has_any(
    store: FileStore, form: Format, experts: str | None
) -> None:
    made = [RolloutMaker(store=store, experts=experts).make("a", [[TURN]])]
    plan = plan_of(made, format=form, rules=PackingRules(data_ranks=2, seq_len=64))
    (sample,), (filler,) = decoded(store, plan)
    assert [len(sample[0]), len(filler[0])] == [5, 2]
    assert filler[1] == [False, False]
    assert filler[8] == filler[5] == [2], "one sequence"
    if experts:
        assert filler[10] == [bytes(2 * 2 * 3), [2, 2, 3], "uint8"]
    else:
        assert filler[10] is sample[10] is None


@pytest.mark.parametrize("form", MICRO_BATCH_FORMATS)
def test_a_sample_without_routes_beside_others_has_zeros_and_leaves_the_loss(store: FileStore, form: Format) -> None:
    made = [
        RolloutMaker(store=store, experts="uint8").make("a", [[TURN]]),
        RolloutMaker(store=store).make("b", [[TURN]]),
    ]
    plan = plan_of(made, format=form, rules=PackingRules(data_ranks=1, seq_len=5))
    [content] = decoded(store, plan)
    masks, routes = [batch[1] for batch in content], [batch[10] for batch in content]
    assert [any(mask) for mask in masks] == [True, False]
    assert routes[1] == [bytes(5 * 2 * 3), [5, 2, 3], "uint8"]
    assert np.any(np.frombuffer(routes[0][0], np.uint8))
    assert sum(rank.loss_tokens for rank in encode_all(store, plan)) == sum(map(sum, masks))


def broadcast(out: Path, version: int, marker: str) -> Path:
    directory = out / "broadcasts" / f"step_{version}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / marker).touch()
    return directory


def test_broadcasts_are_accepted_and_tell_steps_and_versions(tmp_path: Path) -> None:
    assert read_broadcasts(tmp_path) is None
    offered = broadcast(tmp_path, 0, ".sender_ready")
    assert read_broadcasts(tmp_path) is None, "offered, not complete"
    assert not (offered / ".receiver_ready").exists()
    accept_broadcasts(tmp_path)
    assert (offered / ".receiver_ready").exists(), "the trainer waits for this"
    broadcast(tmp_path, 0, ".finished")
    state = read_broadcasts(tmp_path)
    assert state is not None
    assert (state.acked, state.checkpointed) == (NOTHING, NOTHING)
    assert state.policy == PublishedPolicy(version=0, weights=str(offered))
    newest = broadcast(tmp_path, 3, ".finished")
    for step in (1, 2, 3):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    state = read_broadcasts(tmp_path)
    assert state is not None
    assert (state.acked, state.policy) == (2, PublishedPolicy(version=3, weights=str(newest)))
    assert state.checkpointed == 1, "the one of version 3 may be incomplete"


def test_older_broadcasts_are_complete_with_their_marker(tmp_path: Path) -> None:
    broadcast(tmp_path, 2, "STABLE")
    broadcast(tmp_path, 3, "model.safetensors")
    state = read_broadcasts(tmp_path)
    assert state is not None
    assert (state.acked, state.policy and state.policy.version) == (1, 2)


def test_an_environment_called_all_is_refused_with_prime_rls_formats() -> None:
    played = {"environments": {"all": {"use": "arithmetic"}}}
    RunConfig.model_validate(played)
    with pytest.raises(ValueError, match="rename the environment"):
        RunConfig.model_validate({**played, "batch": {"format": "prime-rl"}})
