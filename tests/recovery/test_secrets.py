"""The password of Redis is only in the environment that a process is started with: not in a file, a log, a command
line or an error, and a rollout worker, which starts agents, forgets it."""

from pathlib import Path

from support.cluster import Cluster, cluster_in
from support.waiting import wait_until

PASSWORD = "hunter2/#?@%"
TRACE = b"hunter2"


def leaks(cluster: Cluster) -> list[Path]:
    of_redis = cluster.redis_server.directory
    files = [path for path in cluster.directory.rglob("*") if path.is_file() and not path.is_relative_to(of_redis)]
    running = [Path(f"/proc/{process.pid}/cmdline") for process in cluster.processes if process.exit_code is None]
    return [path for path in [*files, *running] if TRACE in path.read_bytes()]


def test_the_password_is_never_shown(tmp_path: Path) -> None:
    """Also when Redis is killed, and every process logs the address that it cannot reach."""
    with cluster_in(tmp_path, password=PASSWORD, noop={"rollout_s": 60}) as cluster:
        cluster.enter = ["env"]  # else the worker is a fork of this process, with its environment
        workers = [cluster.rollout_worker(concurrency=8), cluster.compute_worker()]
        cluster.enter = []
        started_with = [Path(f"/proc/{worker.pid}/environ") for worker in workers]
        cluster.orchestrator()
        cluster.wait_running(8)
        wait_until(lambda: all(" ready." in worker.text for worker in workers), what="workers that are started")
        assert [TRACE in environment.read_bytes() for environment in started_with] == [False, True]
        assert b"PATH=" in started_with[0].read_bytes()
        with_redis = cluster.headpond("status", str(cluster.run_dir))
        assert f"redis://127.0.0.1:{cluster.redis_server.port}/0 is reachable" in with_redis.text
        cluster.redis_server.kill()
        cluster.wait_waiting_for("does not answer")
        for worker in workers:
            wait_until(lambda worker=worker: "Cannot connect" in worker.text, what="the worker to log it")
        without_redis = cluster.headpond("status", str(cluster.run_dir), "--json")
        assert "cannot be used" in without_redis.text
        assert {path.suffix for path in tmp_path.rglob("*")} >= {".json", ".log", ".sqlite", ".toml"}
        assert leaks(cluster) == []
