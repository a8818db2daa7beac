"""Errors of a user: each is refused with what to change, before anything is started; existing runs lose nothing."""

import re
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.cluster import BIN, Cluster, Process, cluster_in
from support.waiting import wait_until

from headpond.errors import LedgerError
from headpond.ledger import schema
from headpond.ledger.schema import SCHEMA_VERSION
from headpond.processes.embedded_redis import EmbeddedRedis

PASSWORD = "hunter2/#?"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Redis, without lasting workers. A run submits 48 rollouts after its survey and waits."""
    with cluster_in(tmp_path_factory.mktemp("cluster"), noop={"rollout_s": 600.0}) as cluster:
        yield cluster


def refused(process: Process) -> str:
    """The last line of a process that ends with exit code 2."""
    assert process.wait() == 2, process.text
    assert "Traceback" not in process.text
    assert "hunter2" not in process.text
    return process.text.splitlines()[-1]


def begun(cluster: Cluster, name: str) -> Process:
    """A run that has submitted all its rollouts; the worker of its survey is killed."""
    cluster.new_run(name)
    run, surveyor = cluster.orchestrator(), cluster.rollout_worker(concurrency=1)
    in_flight = lambda: cluster.status().rollouts.get("in_flight")  # noqa: E731
    wait_until(lambda: in_flight() == 48, what="48 rollouts in flight")
    surveyor.kill()
    return run


def drained(cluster: Cluster, run: Process) -> None:
    run.signal(signal.SIGINT)
    assert run.wait() == 0
    result = cluster.audit()
    assert result["balanced"], result["problems"]
    assert result["in_flight"] == 48


def test_a_wrong_redis_address_stops_the_run_with_the_setting_to_change(cluster: Cluster) -> None:
    cluster.new_run("wrong-address")
    syntax = cluster.orchestrator(HEADPOND_REDIS_URL="redis://:hunter2/@127.0.0.1:1/0")
    closed_port = cluster.orchestrator(
        HEADPOND_REDIS_URL="redis://:hunter2@127.0.0.1:1/0", HEADPOND_RECOVERY__REDIS_PATIENCE_S="0.5"
    )
    assert refused(syntax).startswith("headpond: environment, HEADPOND_REDIS_URL: redis_url: is not the address")
    message = refused(closed_port)
    assert message.startswith("headpond: Redis at redis://127.0.0.1:1/0 cannot be used (Error 111 connecting to 127.")
    assert message.endswith("start it, or set redis_url (HEADPOND_REDIS_URL) to the right one")


def test_a_wrong_or_missing_redis_password_stops_the_run(cluster: Cluster) -> None:
    cluster.new_run("wrong-password")
    with EmbeddedRedis(cluster.directory / "guarded", password=PASSWORD) as server:
        address = f"127.0.0.1:{server.port}/0"
        wrong = cluster.orchestrator(HEADPOND_REDIS_URL=f"redis://:hunter2@{address}")
        assert f"Redis at redis://{address} refuses the password" in refused(wrong)
        cluster.new_run("missing-password")
        missing = cluster.orchestrator(HEADPOND_REDIS_URL=f"redis://{address}")
        assert f"Redis at redis://{address} requires a password" in refused(missing)


def test_a_second_orchestrator_on_the_same_run_or_redis_is_refused(cluster: Cluster) -> None:
    run = begun(cluster, "driven")
    same_run = cluster.orchestrator()
    cluster.new_run("another")
    same_redis = cluster.orchestrator()
    assert "run_dir" in refused(same_run)
    assert f"{cluster.directory}/driven is in use by process {run.pid} on " in same_run.text
    message = refused(same_redis)
    assert message.startswith("headpond: this Redis database is in use: run ")
    assert f"in {cluster.directory}/driven, process {run.pid} on " in message
    assert "Redis URL" in message
    cluster.new_run("driven")
    drained(cluster, run)


def test_a_run_directory_with_other_settings_or_damage_is_refused(cluster: Cluster) -> None:
    drained(cluster, begun(cluster, "original"))
    original = cluster.run_dir
    damages = {
        "seed": lambda copy: None,
        "run.json": lambda copy: (copy / "run.json").write_text('{"run": '),
        "version": lambda copy: at_version(copy / "ledger.sqlite", 7),
        "ledger": lambda copy: (copy / "ledger.sqlite").write_text("these are notes" * 99),
    }
    messages: dict[str, str] = {}
    for name, damage in damages.items():
        cluster.new_run(f"broken-{name}")
        shutil.copytree(original, cluster.run_dir)
        damage(cluster.run_dir)
        # One at a time: they share a store, and each removes the temporary files of the one before.
        messages[name] = refused(cluster.orchestrator(HEADPOND_SEED="1" if name == "seed" else "0"))
    assert re.search(r"\(seed was 0, now 1\).* run_dir", messages["seed"])
    assert "broken-run.json/run.json is damaged" in messages["run.json"]
    assert f"another version of Headpond (schema 7, not {SCHEMA_VERSION})" in messages["version"]
    assert "cannot be used (file is not a database)" in messages["ledger"]
    cluster.run_dir = original
    assert cluster.audit()["in_flight"] == 48


def at_version(ledger: Path, version: int) -> None:
    with closing(sqlite3.connect(ledger)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


def test_an_unusable_run_directory_is_refused(cluster: Cluster) -> None:
    (cluster.directory / "file").touch()
    places = {"a file": cluster.directory / "file", "below a file": cluster.directory / "file" / "run",
              "not writable, not even for root": Path("/proc/sys/kernel/run")}  # fmt: skip
    started: dict[Path, Process] = {}
    for place in places.values():
        cluster.run_dir = place
        started[place] = cluster.orchestrator()
    for place, process in started.items():
        message = refused(process)
        assert message.startswith(f"headpond: the directory {place} cannot be used (")
        assert message.endswith("fix it, or set run_dir to another one")


def test_a_ledger_on_a_network_file_system_is_refused(cluster: Cluster) -> None:
    """For one process, a copy of the kernel's mount table with an additional line is mounted over the original."""
    cluster.new_run("network")
    mounts = cluster.directory / "mountinfo"
    lines = Path("/proc/self/mountinfo").read_text()
    mounts.write_text(f"{lines}999 1 0:99 / {cluster.run_dir} rw,relatime shared:9 - nfs4 filer:/runs rw,vers=4.2\n")
    mount_over = 'mount --bind "$1" /proc/$$/mountinfo && shift && exec "$@"'
    in_namespace = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount_over, "sh", str(mounts)]
    if subprocess.run([*in_namespace, "true"], capture_output=True).returncode == 0:
        run = [str(BIN / "headpond"), "run", str(cluster.config), "--run-dir", str(cluster.run_dir)]
        message = refused(cluster.start("orchestrator", *in_namespace, *run))
    else:  # mounting is not permitted here
        with pytest.raises(LedgerError) as refusal:
            schema.refuse_network_file_system(cluster.run_dir, mounts.read_text())
        message = str(refusal.value)
    assert re.search(rf"network file system: {cluster.run_dir} is nfs4.* ledger_dir ", message)
    assert not cluster.run_dir.exists()
