"""What nobody names goes; what is named, or is still being played, stays."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ledgers import configured, submitted

from orchestrator import run_dir
from orchestrator.ledger import Ledger
from orchestrator.plan_files import batch_plan
from orchestrator.records import Rollout
from orchestrator.release import release_step
from orchestrator.states import GroupState, JobState, RolloutState
from orchestrator.sweep import Sweep
from penstock.batches import EncodedRank, seal_manifest
from penstock.blobs import BlobRef, Store
from penstock.config import RunConfig
from penstock.messages import RolloutResult

RUN = "run"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = configured(run_dir=tmp_path / "run")
    run_dir.make(config)
    return config


@pytest.fixture
def ledger(config: RunConfig) -> Iterator[Ledger]:
    ledger = Ledger(config.ledger_path)
    yield ledger
    ledger.close()


@pytest.fixture
def store(config: RunConfig) -> Store:
    return Store(config.store_dir)


def put(store: Store, rollout: Rollout, attempt: str, name: str = "columns") -> BlobRef:
    return store.put(f"rollouts/{RUN}/{rollout.id}/{attempt}/{name}", [b"x"])


def swept(config: RunConfig, ledger: Ledger) -> int:
    return asyncio.run(Sweep(config, RUN, ledger).run_once())


def test_the_files_of_other_attempts_go_when_a_rollout_is_settled(
    config: RunConfig, ledger: Ledger, store: Store
) -> None:
    settled, playing = submitted(ledger).rollouts[:2]
    kept = put(store, settled, "2.bb")
    for rollout in (settled, playing):
        put(store, rollout, "1.aa")
        store.part(f"rollouts/{RUN}/{rollout.id}/1.aa/experts", suffix="rows").append(b"half of it")
    ledger.end(ledger.jobs[settled.id], JobState.SETTLED)
    ledger.generated(settled, RolloutResult(reward=0.0, columns=kept))
    assert swept(config, ledger) == 2
    assert store.keys("rollouts") == [kept.key, f"rollouts/{RUN}/{playing.id}/1.aa/columns"]
    assert swept(config, ledger) == 0


def deliver(config: RunConfig, ledger: Ledger, store: Store) -> None:
    """A step of one group, each rollout with its columns; two encoders wrote its rank, one of them in vain."""
    group = submitted(ledger)
    for rollout in group.rollouts:
        ledger.end(ledger.jobs[rollout.id], JobState.SETTLED)
        ledger.generated(rollout, RolloutResult(reward=0.0, columns=put(store, rollout, "1.aa"), sample_lengths=(1,)))
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
    ledger.deliver(batch)


def test_of_a_delivered_step_stays_what_its_manifest_names(config: RunConfig, ledger: Ledger, store: Store) -> None:
    deliver(config, ledger, store)
    put(store, next(iter(submitted(ledger).rollouts)), "1.aa")
    assert swept(config, ledger) == 1
    assert len(store.keys(f"rollouts/{RUN}")) == 5
    assert store.keys("batches") == [
        f"batches/step_000000/{name}" for name in ("manifest.json", "rank_00.good.safetensors", "rollouts.good.jsonl")
    ]


def test_of_a_released_step_the_manifest_and_what_people_read_stay(
    config: RunConfig, ledger: Ledger, store: Store
) -> None:
    deliver(config, ledger, store)
    assert release_step(store, 0, experts=False) == 4
    ledger.set("columns_released", 1)
    swept(config, ledger)
    assert store.keys("rollouts") == []
    assert not (store.root / "rollouts" / RUN / "g0000001-0").exists()
    assert store.keys("batches") == [f"batches/step_000000/{name}" for name in ("manifest.json", "rollouts.good.jsonl")]


def test_files_that_a_rebuilt_ledger_does_not_know_stay(config: RunConfig, ledger: Ledger, store: Store) -> None:
    deliver(config, ledger, store)
    asyncio.run(ledger.committed())
    asyncio.run(_forget_results(ledger))
    swept(config, ledger)
    assert len(store.keys(f"rollouts/{RUN}")) == 4


async def _forget_results(ledger: Ledger) -> None:
    """As `rebuild` leaves it: the manifests say which rollouts were delivered, not what they answered."""
    for index in range(4):
        rollout = Rollout(group="g0000001", index=index, step=0, state=RolloutState.DELIVERED)
        ledger._touch("rollouts", rollout)
    await ledger.committed()
