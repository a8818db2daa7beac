"""Files that ledger and manifests do not name are deleted; named files and those of running rollouts stay."""

import asyncio
import errno
import re
import sqlite3
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import configured, submitted
from support.stores import blob_keys, run_store
from support.waiting import wait_until

from headpond.batches import BatchReader, EncodedRank, read_manifest, seal_manifest
from headpond.batches.signals import TrainerState
from headpond.config import RunConfig
from headpond.ledger import queries, schema
from headpond.ledger.archive import has_closing
from headpond.ledger.states import GroupState, JobState, Purpose, RolloutState
from headpond.orchestrator import release, run_dir
from headpond.orchestrator.exchange.inputs import batch_plan
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import BatchRecord, RolloutRecord
from headpond.orchestrator.release import Releaser, Sweeper, releasable, release_step
from headpond.orchestrator.trainer import Trainer
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef
from headpond.store.files import FileStore

RUN = "run"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = configured(run_dir=tmp_path / "run")
    run_dir.create_directories(config)
    return config


@pytest.fixture
def ledger(config: RunConfig) -> Iterator[Ledger]:
    ledger = Ledger(config.ledger_path)
    yield ledger
    ledger.close()


@pytest.fixture
def store(config: RunConfig) -> FileStore:
    return run_store(config)


def put(store: FileStore, rollout: RolloutRecord, attempt: str, name: str = "columns") -> BlobRef:
    return store.put(f"rollouts/{RUN}/{rollout.id}/{attempt}/{name}", [b"x"])


def swept(config: RunConfig, ledger: Ledger) -> int:
    return asyncio.run(Sweeper(config, RUN, ledger).run_once())


def test_the_files_of_other_attempts_are_swept_when_a_rollout_is_settled(
    config: RunConfig, ledger: Ledger, store: FileStore
) -> None:
    settled, playing = submitted(ledger).rollouts[:2]
    kept = put(store, settled, "2.bb")
    for rollout in (settled, playing):
        put(store, rollout, "1.aa")
        store.part(f"rollouts/{RUN}/{rollout.id}/1.aa/experts", suffix="rows").append(b"half of it")
    ledger.end(ledger.jobs[settled.id], JobState.SETTLED)
    ledger.generated(settled, RolloutResult(reward=0.0, columns=kept))
    assert swept(config, ledger) == 2
    assert blob_keys(store, "rollouts") == [kept.key, f"rollouts/{RUN}/{playing.id}/1.aa/columns"]
    assert swept(config, ledger) == 0


def test_a_file_is_deleted_after_the_commit_that_made_it_unwanted(
    config: RunConfig, ledger: Ledger, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another task may drop a rollout between a commit and the deletion: a kill would leave a rollout without files."""
    rollout, states = submitted(ledger).rollouts[0], list[str]()

    def delete(store: FileStore, keys: Collection[str]) -> None:
        with schema.reading(config.ledger_path) as connection:
            states.extend(row[0] for row in connection.execute("SELECT state FROM rollouts WHERE idx = 0"))

    async def drop_and_release() -> None:
        ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
        ledger.generated(rollout, RolloutResult(reward=0.0, columns=put(store, rollout, "1.aa")))
        await ledger.committed()
        ledger.drop(rollout, "stale")
        await Releaser(config, ledger, Trainer(config, ledger)).run_once()

    monkeypatch.setattr(release, "delete", delete)
    asyncio.run(drop_and_release())
    assert states == ["filtered"]


def test_the_files_of_an_evaluation_are_deleted_with_its_scores_and_swept_after_a_kill(
    config: RunConfig, ledger: Ledger, store: FileStore
) -> None:
    group = submitted(ledger, 3, environment="held_out", purpose=Purpose.EVALUATION)
    scored, killed, playing = group.rollouts
    for rollout in (scored, killed):
        ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
        ledger.generated(rollout, RolloutResult(reward=0.0, columns=put(store, rollout, "1.aa")))
    put(store, playing, "1.aa")
    ledger.move(scored, RolloutState.EVALUATED)
    asyncio.run(Releaser(config, ledger, Trainer(config, ledger)).run_once())
    left = [f"rollouts/{RUN}/{rollout.id}/1.aa/columns" for rollout in (killed, playing)]
    assert blob_keys(store, "rollouts") == left
    assert swept(config, ledger) == 0
    assert ledger.state.open_bytes == 0
    ledger.cancel(group, "the run has ended")
    assert swept(config, ledger) == 2
    assert blob_keys(store, "rollouts") == []


def deliver(config: RunConfig, ledger: Ledger, store: FileStore, *, experts: bool = False) -> None:
    ledger.deliver(seal(config, ledger, store, experts=experts))


def seal(config: RunConfig, ledger: Ledger, store: FileStore, *, experts: bool = False) -> BatchRecord:
    """A step of one group, each rollout with its files; two encoders wrote its rank, one of them too late."""
    group = submitted(ledger)
    for rollout in group.rollouts:
        ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
        columns, routed = put(store, rollout, "1.aa"), put(store, rollout, "1.aa", "experts") if experts else None
        ledger.generated(rollout, RolloutResult(reward=0.0, columns=columns, experts=routed, sample_lengths=(1,)))
        rollout.advantage = 0.0
        ledger.move(rollout, RolloutState.ADMITTED)
    ledger.enter(group, GroupState.ADMITTED)
    batch = ledger.compose(0, [group])
    plan = batch_plan(config, batch)
    files = [store.put(f"{plan.directory}/rank_00.{name}.safetensors", [b"x"]) for name in ("good", "late")]
    jsonl = store.put(f"{plan.directory}/rollouts.good.jsonl", [b"{}\n"])
    rank = EncodedRank(
        plan=plan.digest, data_rank=0, file=files[0], rollouts_jsonl=jsonl, micro_batches=1, tokens=4, samples=4,
        loss_tokens=4,
    )  # fmt: skip
    seal_manifest(store, plan, [rank])
    return batch


def test_a_step_that_is_delivered_during_a_sweep_keeps_its_files(
    config: RunConfig, ledger: Ledger, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another task of the loop may deliver it as soon as a commit has ended, before that delivery is committed."""
    batch, commit = seal(config, ledger, store), ledger.committed

    async def commit_then_deliver() -> None:
        await commit()
        if batch.step in ledger.batches:
            ledger.deliver(batch)

    monkeypatch.setattr(ledger, "committed", commit_then_deliver)
    assert swept(config, ledger) == 1, "the file of the late encoder"
    assert len(blob_keys(store, f"rollouts/{RUN}")) == 4


def test_a_sweep_keeps_what_the_manifest_of_a_delivered_step_names(
    config: RunConfig, ledger: Ledger, store: FileStore
) -> None:
    deliver(config, ledger, store)
    put(store, next(iter(submitted(ledger).rollouts)), "1.aa")
    assert swept(config, ledger) == 1
    assert len(blob_keys(store, f"rollouts/{RUN}")) == 5
    assert blob_keys(store, "batches") == [
        f"batches/step_000000/{name}" for name in ("manifest.json", "rank_00.good.safetensors", "rollouts.good.jsonl")
    ]


def test_a_released_step_keeps_its_manifest_and_rollouts_jsonl(
    config: RunConfig, ledger: Ledger, store: FileStore
) -> None:
    deliver(config, ledger, store)
    manifest = read_manifest(store, 0)
    assert manifest
    ledger.state.released |= {"columns_released": 1}
    release_step(store, manifest, "columns_released", ledger.state.released)
    swept(config, ledger)
    assert blob_keys(store, "rollouts") == []
    assert not (store.root / "rollouts" / RUN / "g0000001-0").exists()
    assert blob_keys(store, "batches") == [
        f"batches/step_000000/{name}" for name in ("manifest.json", "rollouts.good.jsonl")
    ]


async def checkpointed(config: RunConfig, ledger: Ledger) -> Releaser:
    """The trainer has checkpointed the first step, and the orchestrator has read that."""
    BatchReader(config.run_dir, data_rank=0, data_ranks=1, resume_step=0).checkpointed(0)
    trainer = Trainer(config, ledger)
    await trainer.read()
    await ledger.committed()
    return Releaser(config, ledger, trainer)


def test_every_kind_of_file_is_kept_as_long_as_its_setting_says(
    config: RunConfig, ledger: Ledger, store: FileStore
) -> None:
    deliver(config, ledger, store, experts=True)
    names = lambda: {key.rpartition("/")[2].partition(".")[0] for under in ("rollouts", "batches")  # noqa: E731
                     for key in blob_keys(store, under)}  # fmt: skip
    left = {
        0: {"columns", "rank_00", "rollouts", "manifest"},
        1: {"columns", "rank_00", "rollouts", "manifest"},
        2: {"rollouts", "manifest"},
        3: {"manifest"},
        4: set[str](),
    }
    kept = {"keep_steps": 2, "keep_jsonl_steps": 3, "keep_manifests": 4}
    trainer = Trainer(config, ledger)
    releaser = Releaser(configured(run_dir=config.run_dir, trainer=kept), ledger, trainer)
    for step, expected in left.items():
        trainer.state = TrainerState(acked=step, checkpointed=step)
        asyncio.run(releaser.run_once())
        assert names() == expected, step
        swept(config, ledger)
        assert names() == expected, step


def test_manifests_outlive_the_files_that_they_name() -> None:
    settings = configured(trainer={"keep_jsonl_steps": 5, "keep_manifests": 1}).trainer
    assert releasable(settings, TrainerState(acked=9, checkpointed=9)) == {
        "experts_released": 10, "columns_released": 8, "jsonl_released": 5, "manifests_released": 5,
    }  # fmt: skip
    assert "manifests_released" not in releasable(configured().trainer, TrainerState(acked=9, checkpointed=9))


def test_a_trainer_that_never_checkpoints_is_named_with_the_bytes_that_it_holds(
    config: RunConfig, ledger: Ledger
) -> None:
    trainer = Trainer(config, ledger)
    releaser = Releaser(config, ledger, trainer)
    ledger.state.delivered_bytes = 12 * 10**9
    ledger.state.steps_delivered = 21
    assert releaser.notes() == [], "the trainer's files were not read yet"
    trainer.state = TrainerState(acked=20, checkpointed=5)
    assert releaser.notes() == []
    trainer.state = TrainerState(acked=20, checkpointed=-1)
    (note,) = releaser.notes()
    assert re.search(
        r'12\.0 GB .*step 20 .*step 0: .*reader\.checkpointed\(step\).* trainer\.release_on = "acked"', note
    )
    trainer.state = TrainerState(acked=-1, checkpointed=-1)
    assert re.search(r"step 0: .*reader\.ack\(step\)", releaser.notes()[0])
    ledger.state.delivered_bytes = 0
    assert releaser.notes() == []


def test_a_file_is_deleted_only_after_the_commit_that_releases_it(
    config: RunConfig, ledger: Ledger, store: FileStore
) -> None:
    deliver(config, ledger, store, experts=True)
    before = len(blob_keys(store, "rollouts"))

    async def stopped_at_the_first_file() -> None:
        release = await checkpointed(config, ledger)
        releasing = asyncio.create_task(release.run_once())
        while len(blob_keys(store, "rollouts")) == before:
            await asyncio.sleep(0)
        releasing.cancel()

    asyncio.run(stopped_at_the_first_file())
    with schema.reading(config.ledger_path) as connection:
        assert queries.released_steps(connection)["experts_released"] == 1


def test_concurrent_releases_release_a_step_once(config: RunConfig, ledger: Ledger, store: FileStore) -> None:
    deliver(config, ledger, store, experts=True)
    held = ledger.state.delivered_bytes

    async def both() -> None:
        release = await checkpointed(config, ledger)
        await asyncio.gather(release.run_once(), release.run_once())

    asyncio.run(both())
    assert ledger.state.delivered_bytes == held - 4
    assert [key.rpartition("/")[2] for key in blob_keys(store, "rollouts")] == ["columns"] * 4


def test_released_experts_that_a_kill_left_are_swept(config: RunConfig, ledger: Ledger, store: FileStore) -> None:
    deliver(config, ledger, store, experts=True)
    ledger.state.released |= {"experts_released": 1}
    swept(config, ledger)
    assert [key.rpartition("/")[2] for key in blob_keys(store, "rollouts")] == ["columns"] * 4


def test_files_of_a_released_step_that_a_kill_or_a_late_encoder_left_are_swept(
    config: RunConfig, ledger: Ledger, store: FileStore
) -> None:
    """The ledger has released the step; its files are still there."""
    deliver(config, ledger, store)
    ledger.state.released |= {"columns_released": 1}
    assert swept(config, ledger) == 6  # the columns of four rollouts, the ranks of two encoders
    assert blob_keys(store, "batches") == [
        f"batches/step_000000/{name}" for name in ("manifest.json", "rollouts.good.jsonl")
    ]
    store.put("batches/step_000000/rank_00.later.safetensors", [b"x"])
    assert swept(config, ledger) == 1


def test_two_sweeps_at_once_remove_each_file_once(config: RunConfig, ledger: Ledger, store: FileStore) -> None:
    """When a finished run is started again, its periodic sweep starts together with the final one."""
    for number in range(3 * release.SWEPT_AT_ONCE):
        store.put(f"rollouts/{RUN}/r{number}/1.aa/columns", [b"x"])

    async def sweep_twice() -> list[int]:
        sweep = Sweeper(config, RUN, ledger)
        return await asyncio.gather(sweep.run_once(), sweep.run_once())

    assert asyncio.run(sweep_twice()) == [3 * release.SWEPT_AT_ONCE, 0]


def test_a_sweep_looks_up_a_few_rollouts_at_a_time_and_only_those_that_have_files(
    config: RunConfig, ledger: Ledger, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the loop, which 20,000 open groups must not block; in the archive, which may hold millions."""
    groups = [submitted(ledger) for _ in range(15)]
    for group in groups:
        for rollout in group.rollouts:
            ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
            ledger.generated(rollout, RolloutResult(reward=0.0, columns=put(store, rollout, "1.aa")))
    with_files = groups[:10]
    for group in groups[5:]:
        for rollout in group.rollouts:
            ledger.drop(rollout, "stale")
            if group not in with_files:
                store.sweep(f"rollouts/{RUN}/{rollout.id}", named=())
        ledger.enter(group, GroupState.CLOSED)
    ledger.unwanted_blobs.clear()
    archived(config, ledger)
    looked_up, asked = list[int](), list[str]()
    sort_out, delivered_files = release.sort_out, queries.delivered_files

    def counted(names: list[str], *arguments: Any) -> release.SomeRollouts:
        looked_up.append(len(names))
        return sort_out(names, *arguments)

    def asking(connection: sqlite3.Connection, run: str, groups: Collection[str]) -> Iterator[queries.DeliveredFiles]:
        asked.extend(groups)
        return delivered_files(connection, run, groups)

    monkeypatch.setattr(release, "sort_out", counted)
    monkeypatch.setattr(queries, "delivered_files", asking)
    monkeypatch.setattr(release, "SWEPT_AT_ONCE", 16)
    assert swept(config, ledger) == 5 * 4
    assert sum(looked_up) == 10 * 4
    assert max(looked_up) <= 16
    assert set(asked) == {group.id for group in groups[5:10]}
    assert len(blob_keys(store, f"rollouts/{RUN}")) == 5 * 4


def archived(config: RunConfig, ledger: Ledger) -> None:
    """Wait until no closed group is left in the hot tables."""
    asyncio.run(ledger.committed())

    def done() -> bool:
        with schema.reading(config.ledger_path) as connection:
            return not has_closing(connection)

    wait_until(done)


def test_a_store_that_cannot_be_listed_is_reported_and_swept_later(
    config: RunConfig,
    ledger: Ledger,
    store: FileStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(store, submitted(ledger).rollouts[0], "1.aa")
    sweeper = Sweeper(config, RUN, ledger)
    with monkeypatch.context() as stale:
        stale.setattr(FileStore, "names", stale_file_handle)
        for _ in range(3):
            assert asyncio.run(sweeper.run_once()) == 0
    assert "[Errno 116] Stale file handle" in (sweeper.sweeping.text or "")
    assert caplog.text.count("action=duty_failed") == 1
    asyncio.run(sweeper.run_once())
    assert sweeper.sweeping.text is None


def test_a_directory_that_cannot_be_removed_does_not_keep_the_others(
    config: RunConfig, ledger: Ledger, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = submitted(ledger)
    for rollout in group.rollouts[:2]:
        put(store, rollout, "1.aa")
        ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
        ledger.drop(rollout, "cancelled")
    sweep = FileStore.sweep

    def busy(self: FileStore, under: str, *, named: Collection[str]) -> list[str]:
        if under.endswith(group.rollouts[0].id):
            raise OSError(errno.EBUSY, "Device or resource busy")
        return sweep(self, under, named=named)

    monkeypatch.setattr(FileStore, "sweep", busy)
    assert swept(config, ledger) == 1


def test_an_unreadable_manifest_does_not_end_the_run_that_releases_it(
    config: RunConfig, ledger: Ledger, store: FileStore
) -> None:
    deliver(config, ledger, store)
    trainer = Trainer(config, ledger)
    trainer.state = TrainerState(acked=0, checkpointed=0)
    releaser = Releaser(config, ledger, trainer)
    path = store.root / "batches/step_000000/manifest.json"
    content = path.read_bytes()
    path.write_bytes(b"{")
    asyncio.run(releaser.run_once())
    assert releaser.releasing.text is not None
    assert ledger.state.released["experts_released"] == 0
    path.write_bytes(content)
    asyncio.run(releaser.run_once())
    assert releaser.releasing.text is None
    assert ledger.state.released["experts_released"] == 1


def stale_file_handle(*_: object) -> None:
    raise OSError(errno.ESTALE, "Stale file handle")
