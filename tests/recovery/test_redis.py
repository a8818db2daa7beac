"""Redis is killed, flushed and disconnected during a run: all processes wait, and lost jobs are submitted again."""

import re
import signal
from pathlib import Path

import pytest
from support.cluster import Cluster, cluster_in
from support.redis_proxy import watched_port
from support.waiting import wait_until

from headpond.broker import redis_keys


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


@pytest.mark.parametrize(
    "moment",
    [
        rb"reply\.celery\.pidbox.*HELLO",
        rb"PUBLISH\S*\s+\S+\s+/0\.celery\.pidbox",
        rb"worker\.online",
        rb"worker\.heartbeat",
    ],
    ids=["connection to search for workers", "search for workers", "first event", "heartbeat"],
)
def test_a_worker_says_that_redis_is_away_and_obeys_signals(tmp_path: Path, moment: bytes) -> None:
    """Whichever command is the first that finds no Redis."""
    with cluster_in(tmp_path) as cluster:
        all_sent = bytearray()

        def kill(sent: bytes) -> None:
            all_sent.extend(sent)
            if re.search(moment, all_sent, re.DOTALL):
                cluster.redis_server.kill()

        with watched_port(cluster.redis_server.port, kill) as port:
            worker = cluster.compute_worker(HEADPOND_REDIS_URL=f"redis://127.0.0.1:{port}/0")
            wait_until(lambda: "Cannot connect" in worker.text, what="the worker to log that Redis is away")
            assert not cluster.redis_server.running
            worker.signal(signal.SIGTERM)
            assert worker.wait() == 0


def test_messages_that_a_killed_run_left_are_removed_by_the_next_run(tmp_path: Path) -> None:
    """Their sequences would make the next run's queued jobs look lost, and workers would play them for nothing."""
    with cluster_in(tmp_path, noop={"rollout_s": 60}) as cluster:
        surveyor, killed = cluster.rollout_worker(concurrency=1), cluster.orchestrator()
        wait_until(lambda: cluster.redis.llen("rollouts") >= 40, what="40 queued rollouts")
        killed.kill()
        surveyor.kill()
        cluster.configure(recovery={"lease_s": 5.0})  # longer than a busy machine delays a lease
        cluster.redis.delete(redis_keys.LOCK)  # it lapses 10 s after the kill
        cluster.new_run("next")
        run = cluster.orchestrator()
        wait_until(lambda: "action=leftovers_removed queue=rollouts" in run.text, what="the end of the leftovers")
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
