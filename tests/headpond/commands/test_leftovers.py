"""`headpond gc` finds and deletes what nothing reads again, and nothing else."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import admitted, configured, submitted
from support.stores import run_store
from typer.testing import CliRunner

from headpond.batches import BatchReader, EncodedRank, seal_manifest
from headpond.commands.leftovers import OLD_SESSIONS, OTHER_RUNS, RELEASED_STEPS, UNNAMED, collect
from headpond.commands.main import app
from headpond.config import RunConfig
from headpond.errors import RunLocked
from headpond.ids import rollout_directory
from headpond.inspection import run_json
from headpond.inspection.audit import audit
from headpond.orchestrator import run_dir
from headpond.orchestrator.exchange.inputs import batch_plan
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.lock import lock_directory
from headpond.records.rollout import RolloutResult
from headpond.store import BlobRef
from headpond.store.files import FileStore

STEPS = 4


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = configured(run_dir=tmp_path / "run", trainer={"keep_steps": 1, "keep_jsonl_steps": 1}, batch={"size": 1})
    run_dir.create_directories(config)
    run_dir.begin_or_resume(config)
    return config


@pytest.fixture
def store(config: RunConfig) -> FileStore:
    return run_store(config)


@pytest.fixture
def run(config: RunConfig, store: FileStore) -> Iterator[str]:
    """Four delivered steps, a fifth that is encoded, a rollout that runs, and one that was dropped."""
    run = run_json.read(config.run_dir)["run"]
    written(config, lambda ledger: fill(config, ledger, store, run))
    yield run
    result = audit(config.run_dir)
    assert result["balanced"], result["problems"]


def written(config: RunConfig, write: Callable[[Ledger], object]) -> None:
    async def run() -> None:
        ledger = Ledger(config.ledger_path)
        write(ledger)
        await ledger.committed()
        ledger.close()

    asyncio.run(run())


def put(store: FileStore, run: str, rollout: str, name: str, execution: str = "1.aa") -> BlobRef:
    return store.put(f"{rollout_directory(run, rollout)}/{execution}/{name}", [b"tokens"])


def fill(config: RunConfig, ledger: Ledger, store: FileStore, run: str) -> None:
    for step in range(STEPS + 1):
        group = admitted(ledger)
        for rollout in group.rollouts:
            columns, experts = (put(store, run, rollout.id, name) for name in ("columns", "experts"))
            put(store, run, rollout.id, "columns", "2.lost")
            rollout.result = RolloutResult(reward=0.0, columns=columns, experts=experts, sample_lengths=(1,))
        batch = ledger.compose(step, [group])
        plan = batch_plan(config, batch)
        files = [store.put(f"{plan.directory}/{name}", [b"rows"]) for name in ("rank_00.x", "rank_00.late", "jsonl")]
        rank = EncodedRank(
            plan=plan.digest, data_rank=0, file=files[0], rollouts_jsonl=files[2], micro_batches=1, tokens=4,
            samples=4, loss_tokens=4,
        )  # fmt: skip
        if step < STEPS:
            seal_manifest(store, plan, [rank])
            ledger.deliver(batch)
    put(store, run, submitted(ledger).rollouts[0].id, "columns")
    dropped = submitted(ledger).rollouts[0]
    put(store, run, dropped.id, "columns")
    ledger.drop(dropped, "cancelled")


def files(config: RunConfig) -> set[str]:
    return {path.relative_to(config.run_dir).as_posix() for path in config.run_dir.rglob("*") if path.is_file()}


def counts(result: dict[str, Any]) -> dict[str, int]:
    return {kind: found["files"] for kind, found in result["kinds"].items() if found["files"]}


def test_a_dry_run_changes_nothing_and_counts_what_is_deleted(config: RunConfig, run: str) -> None:
    before = files(config)
    dry = collect(config.run_dir, dry_run=True)
    assert files(config) - {"ledger.sqlite-shm", "ledger.sqlite-wal"} == before
    # Of each rollout in a step, the file of a lost execution; of each delivered step, a file of a late encoder.
    assert counts(dry) == {UNNAMED: 4 * (STEPS + 1) + STEPS + 1}
    assert dry["bytes"] == 6 * (4 * (STEPS + 1) + 1) + 4 * STEPS
    done = collect(config.run_dir, dry_run=False)
    assert (done["kinds"], done["troubles"]) == (dry["kinds"], [])
    assert len(before) - len(files(config) - {"lock"}) == dry["files"]
    assert collect(config.run_dir, dry_run=False)["files"] == 0


def test_no_file_that_a_manifest_of_an_unreleased_step_names_is_deleted(
    config: RunConfig, run: str, store: FileStore
) -> None:
    collect(config.run_dir, dry_run=False)
    left = files(config)
    for step in range(STEPS):
        assert f"store/batches/step_{step:06d}/manifest.json" in left
        assert f"store/batches/step_{step:06d}/rank_00.x" in left
    names = ("rank_00.x", "rank_00.late", "jsonl")
    assert {f"store/batches/step_{STEPS:06d}/{name}" for name in names} <= left, "an open step keeps everything"
    assert sum(name.endswith("1.aa/experts") for name in left) == 4 * (STEPS + 1)
    assert sum(name.endswith("1.aa/columns") for name in left) == 4 * (STEPS + 1) + 1, "and that of the running one"


def test_a_lost_ledger_keeps_what_the_manifests_name(config: RunConfig, run: str) -> None:
    """A ledger rebuilt from the manifests knows no files."""
    from headpond.orchestrator.ledger import rebuild

    config.ledger_path.unlink()
    rebuild.rebuild_if_lost(config)
    collect(config.run_dir, dry_run=False)
    assert sum(name.endswith("1.aa/experts") for name in files(config)) >= 4 * STEPS


def test_what_the_trainer_released_after_the_end_of_the_run_is_deleted(config: RunConfig, run: str) -> None:
    reader = BatchReader(config.run_dir, data_rank=0, data_ranks=1, resume_step=2)
    reader.checkpointed(2)
    dry = collect(config.run_dir, dry_run=True)
    # Experts of steps 0 to 2; columns, rank files and rollouts.jsonl of steps 0 and 1.
    assert counts(dry)[RELEASED_STEPS] >= 3 * 4 + 2 * 4 + 2 * 3
    collect(config.run_dir, dry_run=False)
    left = files(config)
    assert sum(name.endswith("1.aa/experts") for name in left) == 4 * 2
    assert {name.rpartition("/")[2] for name in left if "step_000001" in name} == {"manifest.json"}
    assert {name.rpartition("/")[2] for name in left if "step_000002" in name} == {
        "manifest.json",
        "rank_00.x",
        "jsonl",
    }


def test_the_broadcasts_of_prime_rls_trainer_release_steps(tmp_path: Path) -> None:
    out = tmp_path / "out"
    batch = {"size": 1, "format": "prime-rl", "output_dir": out}
    config = configured(run_dir=tmp_path / "run", trainer={"keep_steps": 1, "release_on": "acked"}, batch=batch)
    run_dir.create_directories(config)
    run = run_dir.begin_or_resume(config)
    written(config, lambda ledger: fill(config, ledger, run_store(config), run))
    (out / "batches" / "step_1").mkdir(parents=True)
    (out / "batches" / "step_1" / "rank_0.bin").touch()
    for version, marker in ((3, ".finished"), (4, ".sender_ready")):
        (out / "broadcasts" / f"step_{version}").mkdir(parents=True)
        (out / "broadcasts" / f"step_{version}" / marker).touch()
    assert counts(collect(config.run_dir, dry_run=True))[RELEASED_STEPS] >= 3 * 4 + 2 * 4 + 2
    collect(config.run_dir, dry_run=False)
    assert sum(name.endswith("1.aa/experts") for name in files(config)) == 4 * 2
    assert not (out / "batches" / "step_1").exists()
    assert not list(out.rglob(".receiver_ready")), "only an orchestrator accepts a broadcast"


def test_files_of_other_runs_and_old_sessions_are_deleted(config: RunConfig, run: str, store: FileStore) -> None:
    store.put("rollouts/another/g0000001-0/1.aa/columns", [b"x"])
    store.put("plans/another.g0000001.json", [b"{}"])
    store.put(f"plans/{run}.g0000001.json", [b"{}"])
    for session in ("old", "new"):
        blob = store.put(f"sessions/host-1/{session}/columns", [b"x"])
        path = store.path(blob.key)
        path.with_name(".log").write_bytes(b"unfinished")
        if session == "old":
            for each in (path.parent, *path.parent.iterdir()):
                os.utime(each, (0, 0))
    (store.path("sessions/host-1") / ".lock").touch()
    assert counts(collect(config.run_dir, dry_run=False)) == {
        UNNAMED: 4 * (STEPS + 1) + STEPS + 1, OTHER_RUNS: 2, OLD_SESSIONS: 2,
    }  # fmt: skip
    assert list(store.keys("plans")) == [f"plans/{run}.g0000001.json"]
    assert {name for name in files(config) if "sessions" in name} == {
        f"store/sessions/host-1/{name}" for name in (".lock", "new/columns", "new/.log")
    }


def test_nothing_is_deleted_while_an_orchestrator_works(config: RunConfig, run: str) -> None:
    with lock_directory(config.run_dir):
        before = files(config)
        with pytest.raises(RunLocked, match="is in use by process"):
            collect(config.run_dir, dry_run=False)
        assert collect(config.run_dir, dry_run=True)["files"] > 0
        assert files(config) == before


def test_a_directory_that_cannot_be_deleted_is_reported_and_does_not_keep_the_others(
    config: RunConfig, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = FileStore.sweep

    def busy(self: FileStore, under: str, *, named: Any) -> list[str]:
        if under.endswith("g0000001-0"):
            raise OSError(16, "Device or resource busy")
        return sweep(self, under, named=named)

    monkeypatch.setattr(FileStore, "sweep", busy)
    result = collect(config.run_dir, dry_run=False)
    assert len(result["troubles"]) == 1
    assert "g0000001-0" in result["troubles"][0]
    assert result["files"] == 4 * (STEPS + 1) + STEPS


def test_the_command_prints_sizes_by_kind(config: RunConfig, run: str) -> None:
    plain = CliRunner().invoke(app, ["gc", str(config.run_dir), "--dry-run"])
    assert plain.exit_code == 0, plain.output
    total = 4 * (STEPS + 1) + STEPS + 1
    assert re.search(rf"0\.000 GB in {total} files: .* rollouts/{run}/", plain.stdout)
    assert f"in total   0.000 GB in {total} files may be deleted" in plain.stdout
    result = json.loads(CliRunner().invoke(app, ["gc", str(config.run_dir), "--json"]).stdout)
    assert (result["dry_run"], result["files"], result["troubles"]) == (False, total, [])
