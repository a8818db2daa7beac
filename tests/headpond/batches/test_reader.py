import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from support.rollouts import MadeTurn, RolloutMaker, encode_all, plan_of, seal
from support.stores import directory_store
from support.waiting import wait_until

from headpond.batches import Batch, BatchReader, RunStatus, TrainerState, read_trainer, seal_manifest, write_status
from headpond.batches.signals import NOTHING, PublishedPolicy
from headpond.errors import BatchError, BlobCorrupt, BlobMissing, ConfigError, Stalled
from headpond.store.files import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return directory_store(tmp_path / "store")


def reader_of(
    store: FileStore, *, data_rank: int = 0, data_ranks: int = 1, resume_step: int | None = None
) -> BatchReader:
    return BatchReader(
        store.root.parent, data_rank=data_rank, data_ranks=data_ranks, resume_step=resume_step, timeout_s=0
    )


def seal_step(store: FileStore, step: int, *, data_ranks: int = 1) -> None:
    maker = RolloutMaker(store=store, seed=step, experts="uint8")
    turns = [MadeTurn(context=3, completion=9), MadeTurn(context=2, completion=4)]
    seal(store, plan_of([maker.make(f"s{step}-{n}", [turns]) for n in range(5)], step=step, data_ranks=data_ranks))


def fingerprint(batch: Batch) -> str:
    """Every byte that a trainer gets."""
    state = xxhash.xxh3_64()
    for micro_batch in batch.micro_batches():
        for array in (micro_batch.input_ids, micro_batch.logprobs, micro_batch.loss_weights, micro_batch.advantages):
            state.update(array.tobytes())
        state.update(micro_batch.cu_seqlens.tobytes() + micro_batch.routed_experts().tobytes())
    return state.hexdigest()


def test_a_trainer_reads_every_step_and_reports_its_progress(store: FileStore) -> None:
    run_dir = store.root.parent
    for step in range(3):
        seal_step(store, step)
    write_status(run_dir, RunStatus(why="all steps are sealed", ended=True, last_step=2))
    reader = reader_of(store)
    steps: list[int] = []
    for batch in reader:
        weighted = sum(float(mb.loss_weights.sum()) for mb in batch.micro_batches())
        assert weighted == batch.totals.loss_tokens
        reader.ack(batch.step)
        reader.publish_policy(batch.step + 1, weights=Path("/weights") / str(batch.step))
        if batch.step == 1:
            reader.checkpointed(batch.step)
        steps.append(batch.step)
    assert steps == [0, 1, 2]
    assert read_trainer(run_dir) == TrainerState(
        epoch=1, data_ranks=1, acked=2, checkpointed=1, policy=PublishedPolicy(version=3, weights="/weights/2")
    )
    names = {path.name for path in (run_dir / "trainer").iterdir()}
    assert names == {"rank_00.json", "policy.json", "checkpoint.json", "run.json"}, "as many after a thousand steps"


def test_a_relative_directory_of_weights_is_that_of_the_trainer(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reader_of(store)
    monkeypatch.chdir(tmp_path)
    reader.publish_policy(1, weights="training/weights/1")
    policy = read_trainer(store.root.parent).policy
    assert policy
    assert policy.weights == str(tmp_path / "training" / "weights" / "1"), "the engine has another working directory"


def test_a_trainer_that_resumes_20_steps_back_gets_the_same_batches(store: FileStore) -> None:
    for step in range(25):
        seal_step(store, step, data_ranks=2)
    first = {}
    reader = reader_of(store, data_ranks=2)
    for _ in range(25):
        batch = next(reader)
        first[batch.step] = fingerprint(batch)
        reader.ack(batch.step)
    reader_of(store, data_rank=1, data_ranks=2, resume_step=24)
    assert read_trainer(store.root.parent).acked == 24

    resumed = reader_of(store, data_ranks=2, resume_step=4)
    state = read_trainer(store.root.parent)
    assert (state.epoch, state.acked) == (2, 4)
    again = [next(resumed) for _ in range(20)]
    assert [batch.step for batch in again] == list(range(5, 25))
    assert {batch.step: fingerprint(batch) for batch in again} == {step: first[step] for step in range(5, 25)}

    seal_step(store, 25, data_ranks=2)
    assert next(resumed).step == 25, "then the run continues"


def test_a_new_reader_removes_the_incomplete_signals_of_its_ranks_killed_trainer(store: FileStore) -> None:
    trainer = store.root.parent / "trainer"
    trainer.mkdir()
    ranks = ["rank_00.json.rank_00", "rank_01.json.rank_01", "policy.json.rank_00", "checkpoint.json.rank_01"]
    leftovers = [trainer / f".{name}.tmp" for name in [*ranks, "run.json.0a1b2c3d"]]
    for leftover in leftovers:
        leftover.touch()
    reader_of(store, data_rank=1, data_ranks=2)
    assert [leftover.exists() for leftover in leftovers] == [True, False, True, False, True]
    reader_of(store, data_ranks=2)
    assert [leftover.exists() for leftover in leftovers] == [False, False, False, False, True]


def test_a_rank_that_opens_its_reader_late_does_not_remove_what_another_rank_is_writing(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal_step(store, 0, data_ranks=2)
    early = reader_of(store, data_rank=1, data_ranks=2)
    early.ack(next(early).step)
    fsync = os.fsync

    def opening_the_other(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        reader_of(store, data_ranks=2)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", opening_the_other)
    early.checkpointed(0)
    assert read_trainer(store.root.parent).checkpointed == 0
    assert os.fsync is fsync, "the other reader was opened"


def test_a_reader_waits_for_the_next_step(store: FileStore) -> None:
    steps: list[int] = []
    reader = BatchReader(store.root.parent, data_rank=0, data_ranks=1, timeout_s=60)
    thread = threading.Thread(target=lambda: steps.append(next(reader).step))
    thread.start()
    seal_step(store, 0)
    assert wait_until(lambda: steps) == [0]
    thread.join()


def test_a_stalled_reader_shows_the_status_of_the_orchestrator(store: FileStore) -> None:
    reader = reader_of(store)
    with pytest.raises(Stalled, match=r"no orchestrator .*run"):
        next(reader)
    write_status(store.root.parent, RunStatus(why="the engine is unreachable since 40 s"))
    with pytest.raises(
        Stalled,
        match=r"step_000000/manifest\.json .*0 s.*the engine is unreachable since 40 s",
    ):
        next(reader)
    seal_step(store, 0)
    assert next(reader).step == 0, "a time-out skips no step"


def test_a_run_that_ended_ends_the_loop_after_its_last_step(store: FileStore) -> None:
    run_dir = store.root.parent
    write_status(run_dir, RunStatus(why="10 batches in a row were empty", ended=True, last_step=0))
    reader = reader_of(store)
    with pytest.raises(Stalled, match="10 batches in a row were empty"):
        next(reader)  # step 0 was sealed, but its manifest is not visible here yet
    seal_step(store, 0)
    assert [batch.step for batch in reader] == [0]
    write_status(run_dir, RunStatus(why="resumed"))
    seal_step(store, 1)
    assert next(reader).step == 1, "a resumed run continues"


def test_a_step_is_acked_when_every_rank_acked_it(store: FileStore) -> None:
    run_dir = store.root.parent
    assert read_trainer(run_dir) == TrainerState()
    for step in range(2):
        seal_step(store, step, data_ranks=2)
    first = reader_of(store, data_ranks=2)
    next(first)
    first.ack(0)
    assert read_trainer(run_dir).acked == NOTHING, "the other rank has not opened its reader"
    second = reader_of(store, data_rank=1, data_ranks=2)
    assert read_trainer(run_dir).acked == NOTHING
    next(second)
    second.ack(0)
    assert read_trainer(run_dir).acked == 0


def test_a_step_whose_manifest_was_released_is_named_as_such(store: FileStore) -> None:
    write_status(store.root.parent, RunStatus(why="rollouts are being generated", last_step=9))
    with pytest.raises(Stalled, match=r"step 9 .*trainer.keep_manifests"):
        next(reader_of(store, resume_step=3))


@pytest.mark.parametrize("released", ["rank_*", "experts*"])
def test_a_trainer_that_reads_released_steps_is_told_to_name_its_checkpoint(store: FileStore, released: str) -> None:
    for step in range(2):
        seal_step(store, step)
    first = reader_of(store)
    first.ack(next(first).step)
    first.checkpointed(0)
    for path in [*store.root.rglob(released)]:
        if "step_000001" not in str(path) and "s1-" not in str(path):
            path.unlink()
    with pytest.raises(BlobMissing, match=r"step 0 .*released.*resume_step"):
        fingerprint(next(reader_of(store)))
    assert fingerprint(next(reader_of(store, resume_step=0)))


def test_progress_files_of_a_trainer_with_more_ranks_are_ignored(store: FileStore) -> None:
    for rank in range(4):
        reader_of(store, data_rank=rank, data_ranks=4, resume_step=9)
    assert read_trainer(store.root.parent).acked == 9
    reader_of(store, data_rank=0, data_ranks=2, resume_step=5)
    assert read_trainer(store.root.parent).acked == NOTHING
    reader_of(store, data_rank=1, data_ranks=2, resume_step=5)
    state = read_trainer(store.root.parent)
    assert (state.acked, state.data_ranks) == (5, 2)


def test_reports_and_arguments_that_cannot_be_true_are_refused(store: FileStore) -> None:
    seal_step(store, 0)
    reader = reader_of(store)
    with pytest.raises(BatchError, match=r"ack\(0\): .*-1"):
        reader.ack(0)
    next(reader)
    with pytest.raises(BatchError, match=r"checkpointed\(0\): .*-1"):
        reader.checkpointed(0)
    with pytest.raises(ConfigError, match=r"data_rank 2 .*2 data ranks"):
        reader_of(store, data_rank=2, data_ranks=2)
    with pytest.raises(ConfigError, match="resume_step -2 is not a step"):
        reader_of(store, resume_step=-2)
    with pytest.raises(BatchError, match=r"1 data ranks.* 2"):
        next(reader_of(store, data_ranks=2))


def test_a_store_outside_the_run_directory_is_read(tmp_path: Path) -> None:
    store = directory_store(tmp_path / "elsewhere")
    seal_step(store, 0)
    reader = BatchReader(tmp_path / "run", data_rank=0, data_ranks=1, store=f"file://{store.root}", timeout_s=0)
    assert next(reader).step == 0


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_rank_file_is_named_by_its_key(store: FileStore, damage: str) -> None:
    seal_step(store, 0, data_ranks=2)
    path = store.path("batches/step_000000/rank_00.x.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    match damage:
        case "flipped":
            path.write_bytes(content)
        case "truncated":
            path.write_bytes(content[:100])
        case _:
            path.unlink()
    with pytest.raises(BlobMissing if damage == "missing" else BlobCorrupt, match=r"step_000000/rank_0"):
        next(reader_of(store, data_ranks=2))


def test_a_file_of_another_rank_is_refused(store: FileStore) -> None:
    plan = plan_of([RolloutMaker(store=store).make("a", [[MadeTurn(context=1, completion=1)]])], data_ranks=2)
    first, second = encode_all(store, plan)
    seal_manifest(store, plan, [replace(first, file=second.file), second])
    with pytest.raises(BlobCorrupt, match=r"rank_01\.x\.safetensors .*rank 0 of step 0"):
        next(reader_of(store, data_ranks=2))


def test_a_malformed_signal_file_is_named(store: FileStore) -> None:
    path = store.root.parent / "trainer" / "rank_00.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"step": 3}')
    with pytest.raises(BatchError, match=r"rank_00\.json .*version"):
        reader_of(store)
