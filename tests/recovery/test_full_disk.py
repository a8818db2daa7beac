"""Full disks: the run waits, reports it, and continues when there is space."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, Process, cluster_in
from support.small_disk import LimitedDirectory, SmallDisk, small_disk
from support.waiting import wait_until

Disk = SmallDisk | LimitedDirectory


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    with small_disk(tmp_path_factory.mktemp("small") / "disk") as disk:
        yield disk


@pytest.fixture(scope="module")
def cluster(disk: Disk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Redis and workers, with the store on the small disk."""
    directory = tmp_path_factory.mktemp("cluster")
    settings = {"store": f"file://{disk.directory}/store", "noop": {"rollout_s": 0.2}}
    with cluster_in(directory, steps=8, **settings) as cluster:
        cluster.enter = disk.enter
        cluster.rollout_worker(concurrency=8)
        cluster.compute_worker()
        yield cluster


def begin(cluster: Cluster, disk: Disk, run_dir: Path) -> None:
    """Prepare another run, with a new store."""
    cluster.run_dir = run_dir
    shutil.rmtree(disk.inside / "store", ignore_errors=True)


def delivering(disk: Disk, process: Process) -> None:
    """Wait until the run has delivered a step and has not ended."""
    first = disk.inside / "store" / "batches" / "step_000000" / "manifest.json"
    wait_until(lambda: first.exists() or process.exit_code is not None, what="a first step")
    assert process.exit_code is None, process.text


def ends_well(cluster: Cluster, process: Process) -> None:
    assert process.wait() == 0, process.text
    audit = cluster.headpond("audit", str(cluster.run_dir), "--json")
    assert audit.exit_code == 0, audit.text
    result = json.loads(audit.text)
    assert result["balanced"]
    assert result["delivered"] == result["planned"] == 128
    assert "Traceback" not in process.text


def test_the_run_waits_while_the_ledger_disk_is_full(cluster: Cluster, disk: Disk) -> None:
    begin(cluster, disk, cluster.directory / "ledger-run")
    run = cluster.orchestrator(HEADPOND_LEDGER_DIR=str(disk.directory / "ledger"))
    delivering(disk, run)
    with disk.full(run.pid, "ledger"):
        cluster.wait_waiting_for(f"the ledger {disk.directory}/ledger/ledger.sqlite cannot be written (")
        assert "free space" in str(cluster.status().waiting_for)
    ends_well(cluster, run)
    assert run.text.count("action=ledger_waits") == 1


def test_the_run_waits_while_the_store_disk_is_full(cluster: Cluster, disk: Disk) -> None:
    begin(cluster, disk, cluster.directory / "store-run")
    run = cluster.orchestrator()
    delivering(disk, run)
    with disk.full(run.pid, "store/plans"):
        cluster.wait_waiting_for(f"cannot write to the store {disk.directory}/store (")
    ends_well(cluster, run)
    assert run.text.count("action=duty_failed cannot write to the store") == 1


def test_the_run_waits_while_every_disk_is_full(cluster: Cluster, disk: Disk) -> None:
    """No status can be written either: the log reports the full disk."""
    begin(cluster, disk, disk.directory / "run")
    run = cluster.orchestrator()
    delivering(disk, run)
    with disk.full(run.pid, "run"):
        wait_until(lambda: "action=ledger_waits" in run.text, what="the log to report it")
        if isinstance(disk, SmallDisk):
            wait_until(
                lambda: "action=duty_failed cannot write" in run.text and "status.json" in run.text,
                what="the log to report it",
            )
            cluster.run_dir = disk.directory / "another"
            late = cluster.orchestrator(HEADPOND_REDIS_URL="redis://127.0.0.1:1/0")
            assert late.wait() == 2
            assert f"the directory {cluster.run_dir} cannot be used (No space left on device)" in late.text
    cluster.run_dir = disk.directory / "run"
    ends_well(cluster, run)
