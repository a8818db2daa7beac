"""Redis is killed, flushed and disconnected during a run: all processes wait, and lost jobs are submitted again."""

from pathlib import Path

import pytest
from support.cluster import Cluster, cluster_in
from support.waiting import wait_until


def busy(cluster: Cluster) -> None:
    """Wait until 8 rollouts run; the others are queued."""
    cluster.wait_running(8)


def restart(cluster: Cluster) -> None:
    cluster.redis_server.kill()
    cluster.wait_waiting_for("does not answer")
    cluster.redis_server.restart()


def flush(cluster: Cluster) -> None:
    cluster.redis.flushall()


def reset_connections(cluster: Cluster) -> None:
    for kind in ("normal", "pubsub"):
        cluster.redis.client_kill_filter(_type=kind, skipme=True)


@pytest.mark.parametrize(
    ("fault", "appendonly"),
    [(restart, True), (restart, False), (flush, True), (reset_connections, True)],
    ids=["killed with AOF", "killed without AOF", "flushed", "connections reset"],
)
def test_nothing_is_lost_when_redis_fails(tmp_path: Path, fault: object, appendonly: bool) -> None:
    with cluster_in(tmp_path, appendonly=appendonly, noop={"rollout_s": 0.4, "stage_s": 0.05}) as cluster:
        cluster.rollout_worker(concurrency=8)
        cluster.compute_worker()
        run = cluster.orchestrator()
        busy(cluster)
        fault(cluster)  # type: ignore[operator]
        result = cluster.finish(run)
        assert cluster.events("failed") == 0
    assert result["delivered"] == result["planned"] == 48


def test_workers_that_start_while_redis_is_full_wait(tmp_path: Path) -> None:
    with cluster_in(tmp_path) as cluster:
        cluster.redis.config_set("maxmemory", 1)
        workers = [cluster.rollout_worker(), cluster.compute_worker()]
        for worker in workers:
            wait_until(lambda worker=worker: "OutOfMemoryError" in worker.text, what=worker.name)
        cluster.redis.config_set("maxmemory", 0)
        result = cluster.finish(cluster.orchestrator())
        assert all(worker.exit_code is None for worker in workers)
    assert result["delivered"] == result["planned"]


def test_messages_that_a_killed_run_left_are_removed_by_the_next_run(tmp_path: Path) -> None:
    """Their sequences would make the next run's queued jobs look lost, and workers would play them for nothing."""
    with cluster_in(tmp_path, noop={"rollout_s": 60}) as cluster:
        surveyor, killed = cluster.rollout_worker(concurrency=1), cluster.orchestrator()
        wait_until(lambda: cluster.redis.llen("rollouts") >= 40, what="40 queued rollouts")
        killed.kill()
        surveyor.kill()
        cluster.configure(recovery={"lease_s": 5.0})  # longer than a busy machine delays a lease
        cluster.new_run("next")
        run = cluster.orchestrator()
        removed = "action=leftovers_removed queue=rollouts"
        wait_until(lambda: removed in run.text, what="the end of the killed run's lock")
        cluster.rollout_worker(concurrency=4)
        cluster.compute_worker()
        assert run.wait() == 0, run.text
        assert cluster.events("lost") == 0
        assert cluster.audit()["balanced"]


def test_messages_are_small_and_carry_no_readable_arguments(tmp_path: Path) -> None:
    with cluster_in(tmp_path, noop={"rollout_s": 0.05}) as cluster:
        worker, compute = cluster.rollout_worker(concurrency=1), cluster.compute_worker()
        run = cluster.orchestrator()
        wait_until(lambda: cluster.redis.llen("rollouts") >= 30, what="30 queued rollouts")
        messages = cluster.redis.lrange("rollouts", 0, -1)
        cluster.finish(run)
        assert all(b'"argsrepr":""' in message for message in messages)
        assert max(map(len, messages)) < 4096
        for text in (worker.text, compute.text, run.text):
            assert "timeout_s" not in text
            assert '"seed"' not in text
