import asyncio
import errno
from dataclasses import replace
from pathlib import Path

import pytest
from support.ledgers import admitted, configured, encoded, pipeline_of
from support.stores import manifest_path, run_store

from headpond.batches import BatchReader, EncodedRank, read_manifest, read_manifests
from headpond.config import RunConfig
from headpond.errors import BatchError
from headpond.ledger.states import GroupState, JobState, RolloutState
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.planning.composer import Composer, Sealer
from headpond.orchestrator.trainer import Trainer
from headpond.records.inputs import StepAdvantages
from headpond.records.rollout import RolloutResult
from headpond.store import atomic
from headpond.store.files import FileStore
from headpond.tasks.stages.encode import EncodeResult


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return configured(run_dir=tmp_path / "run", batch={"data_ranks": 2})


@pytest.fixture
def store(config: RunConfig) -> FileStore:
    return run_store(config)


def test_a_manifest_names_the_rollouts_and_ranks_of_its_step(
    ledger: Ledger, config: RunConfig, store: FileStore
) -> None:
    group = admitted(ledger)
    group.rollouts[2].masked = True
    batch = ledger.compose(0, [group])
    ranks = encoded(config, batch)
    assert asyncio.run(Sealer(config).seal(batch, ranks))
    manifest = read_manifest(store, 0)
    assert manifest is not None
    assert manifest.plan.groups == (group.id,)
    assert manifest.plan.envs == ("noop",)
    assert [
        (rollout.rollout, rollout.group, rollout.advantage, rollout.masked) for rollout in manifest.plan.rollouts
    ] == [(f"{group.id}-{index}", group.id, index - 1.5, index == 2) for index in range(4)]
    assert manifest.ranks == tuple(ranks)
    totals = manifest.totals
    assert (totals.rollouts, totals.groups, totals.samples, totals.loss_tokens) == (4, 1, 4, 40)


def test_sealing_uses_the_advantages_that_encoding_used(tmp_path: Path) -> None:
    """The step is composed and encoded, the orchestrator restarts with another estimator, then the step is sealed."""
    before = configured(run_dir=tmp_path, batch={"size": 1}, advantages={"estimator": "reinforce_pp"})
    after = configured(run_dir=tmp_path, batch={"size": 1}, advantages={"estimator": "dr_grpo"})

    async def compose() -> list[EncodedRank]:
        ledger = Ledger(before.ledger_path)
        for rollout in admitted(ledger).rollouts:
            rollout.result = RolloutResult(reward=0.0, completion_tokens=10 + rollout.index)
        pipeline = pipeline_of(before, ledger, batch_phase=True)
        composer = Composer(before, ledger, Trainer(before, ledger), pipeline)
        batch = composer.compose()
        assert batch is not None
        final = {rollout.id: 0.25 * rollout.index for rollout in batch.rollouts()}
        pipeline.batch_phase.estimated(batch, StepAdvantages(advantages=final, state='{"steps": 1}'))
        await ledger.committed()
        ledger.close()
        assert batch.advantages != {rollout.id: rollout.advantage for rollout in batch.rollouts()}
        encoded_with.update(batch.advantages)
        return encoded(before, batch)

    async def seal(ranks: list[EncodedRank]) -> None:
        ledger = Ledger(after.ledger_path)
        Composer(after, ledger, Trainer(after, ledger), pipeline_of(after, ledger)).resume()
        batch = ledger.batches[0]
        assert await Sealer(after).seal(batch, ranks)
        ledger.deliver(batch)
        assert batch.row()[-3:] == (None, None, None), "the manifest has its advantages"
        ledger.close()

    encoded_with: dict[str, float] = {}
    asyncio.run(seal(asyncio.run(compose())))
    manifest = read_manifest(run_store(after), 0)
    assert manifest is not None
    assert {rollout.rollout: rollout.advantage for rollout in manifest.plan.rollouts} == encoded_with
    assert manifest.estimator_state == '{"steps": 1}'


def test_a_manifest_is_never_replaced(ledger: Ledger, config: RunConfig, store: FileStore) -> None:
    sealer, path = Sealer(config), manifest_path(store, 0)
    batch = ledger.compose(0, [admitted(ledger)])
    ranks = encoded(config, batch)
    others = [replace(rank, samples=3) for rank in ranks]
    assert asyncio.run(sealer.seal(batch, ranks))
    first = path.read_bytes()
    assert asyncio.run(sealer.seal(batch, ranks))
    with pytest.raises(BatchError, match="step 0 is sealed"):
        asyncio.run(sealer.seal(batch, others))
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]


def test_an_unwritable_disk_is_waited_for(
    ledger: Ledger, config: RunConfig, store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    sealer = Sealer(config)
    batch = ledger.compose(0, [admitted(ledger)])
    ranks = encoded(config, batch)
    store.root.mkdir(parents=True)
    blocked = store.root / "batches"
    blocked.touch()
    for _ in range(3):
        assert not asyncio.run(sealer.seal(batch, ranks))
    trouble = sealer.sealing.text or ""
    assert trouble.startswith(f"cannot write a manifest to the store {store.root} (")
    assert "free space" in trouble
    assert caplog.text.count(f"action=duty_failed {trouble[:20]}") == 1
    blocked.unlink()
    assert asyncio.run(sealer.seal(batch, ranks))
    assert sealer.sealing.text is None
    assert list(read_manifests(store)) == [0]


def test_readers_know_the_start_version_when_the_first_step_is_there(
    ledger: Ledger, config: RunConfig, store: FileStore
) -> None:
    sealer, batch = Sealer(config), ledger.compose(0, [admitted(ledger)])
    ranks = encoded(config, batch)
    blocked = config.run_dir / "trainer"
    config.run_dir.mkdir(exist_ok=True)
    blocked.touch()
    assert not asyncio.run(sealer.seal(batch, ranks, start_version=20))
    assert not list(read_manifests(store))
    blocked.unlink()
    assert asyncio.run(sealer.seal(batch, ranks, start_version=20))
    reader = BatchReader(config.run_dir, data_rank=0, data_ranks=2)
    assert reader.start_version == 20


def test_a_step_whose_manifest_is_visible_is_not_formed_again(
    ledger: Ledger, config: RunConfig, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is linked, its directory cannot be synced, and then a rollout becomes stale."""
    sealer, composer = Sealer(config), Composer(config, ledger, Trainer(config, ledger), pipeline_of(config, ledger))
    groups = [admitted(ledger), admitted(ledger)]
    batch = composer.compose()
    assert batch is not None
    for rank in encoded(config, batch):
        job = ledger.jobs[batch.job_id(rank.data_rank)]
        ledger.submit(job)
        ledger.end(job, JobState.SETTLED, result=EncodeResult(rank=rank))
    with monkeypatch.context() as failing:
        failing.setattr(atomic, "sync_directory", failed_sync)
        ready = composer.encoded(visible=sealer.visible)
        assert ready is not None
        assert not asyncio.run(sealer.seal(*ready))
    assert read_manifest(store, 0) is not None
    ledger.state.policy_version = 100
    again = composer.encoded(visible=sealer.visible)
    assert again is not None
    assert asyncio.run(sealer.seal(*again))
    ledger.deliver(batch)
    assert {group.state for group in groups} == {GroupState.CLOSED}
    assert ledger.states[RolloutState.DELIVERED] == 8


def test_a_step_whose_manifest_could_not_be_linked_may_be_formed_again(
    ledger: Ledger, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealer = Sealer(config)
    batch = ledger.compose(0, [admitted(ledger)])
    monkeypatch.setattr(atomic.os, "link", lambda source, target: failed_sync(target))
    assert not asyncio.run(sealer.seal(batch, encoded(config, batch)))
    assert sealer.visible is None


def failed_sync(directory: Path) -> None:
    raise OSError(errno.EIO, "Input/output error", str(directory))
