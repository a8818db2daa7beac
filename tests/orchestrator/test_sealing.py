import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.ledgers import admitted, configured, encoded

from orchestrator.ledger.ledger import Ledger
from orchestrator.sealing import Sealer
from penstock.batches import read_manifest, read_manifests
from penstock.batches.manifest import manifest_path
from penstock.config import RunConfig
from penstock.errors import BatchError
from penstock.store import Store


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return configured(run_dir=tmp_path / "run", batch={"data_ranks": 2})


@pytest.fixture
def store(config: RunConfig) -> Store:
    return Store(config.store_dir)


def test_a_manifest_says_what_a_step_is_made_of(ledger: Ledger, config: RunConfig, store: Store) -> None:
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


def test_a_manifest_is_never_replaced(ledger: Ledger, config: RunConfig, store: Store) -> None:
    sealer, path = Sealer(config), manifest_path(store, 0)
    batch = ledger.compose(0, [admitted(ledger)])
    ranks = encoded(config, batch)
    others = [replace(rank, samples=3) for rank in ranks]
    assert asyncio.run(sealer.seal(batch, ranks))
    first = path.read_bytes()
    assert asyncio.run(sealer.seal(batch, ranks))
    with pytest.raises(BatchError, match="step 0 is sealed already, from another plan or other files"):
        asyncio.run(sealer.seal(batch, others))
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]


def test_a_disk_that_takes_nothing_is_waited_for(
    ledger: Ledger, config: RunConfig, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    sealer = Sealer(config)
    batch = ledger.compose(0, [admitted(ledger)])
    ranks = encoded(config, batch)
    store.root.mkdir(parents=True)
    blocked = store.root / "batches"
    blocked.touch()
    for _ in range(3):
        assert not asyncio.run(sealer.seal(batch, ranks))
    assert sealer.trouble is not None
    assert sealer.trouble.startswith("the manifest of step 0 cannot be written (")
    assert sealer.trouble.endswith(f"make room or mend the disk of {store.root}; nothing is lost")
    assert caplog.text.count("action=sealing_waits") == 1
    blocked.unlink()
    assert asyncio.run(sealer.seal(batch, ranks))
    assert sealer.trouble is None
    assert list(read_manifests(store)) == [0]
