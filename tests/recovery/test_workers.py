"""Workers die, pause, wedge and stop: their rollouts run elsewhere, and each counts once."""

import os
import signal
from pathlib import Path

from support.cluster import cluster_in
from support.waiting import HANG_S, wait_until


def test_rollouts_of_a_killed_worker_run_on_another(tmp_path: Path) -> None:
    with cluster_in(tmp_path, noop={"rollout_s": 1.0}) as cluster:
        cluster.compute_worker()
        first = cluster.rollout_worker()
        run = cluster.orchestrator()
        cluster.wait_running(16)
        first.kill()
        cluster.rollout_worker()
        result = cluster.finish(run)
        assert cluster.events("lost") >= 8
    assert result["delivered"] == result["planned"] == 48


def test_a_killed_compute_worker_and_a_killed_child_lose_nothing(tmp_path: Path) -> None:
    with cluster_in(tmp_path, noop={"stage_s": 0.2}) as cluster:
        cluster.rollout_worker()
        first = cluster.compute_worker(concurrency=2)
        run = cluster.orchestrator()
        cluster.wait_running(1, of="-filter")
        os.kill(first.children()[0], signal.SIGKILL)
        wait_until(lambda: cluster.status().step >= 1, what="a step")
        first.kill()
        cluster.compute_worker(concurrency=2)
        result = cluster.finish(run)
    assert result["delivered"] == result["planned"] == 48


def test_a_worker_paused_past_its_lease_is_fenced(tmp_path: Path) -> None:
    few = {"max_in_flight": 24}  # so that jobs submitted again are not behind all others
    with cluster_in(tmp_path, steps=6, rollouts=few, noop={"rollout_s": 0.5}) as cluster:
        cluster.compute_worker()
        paused = cluster.rollout_worker(concurrency=8)
        run = cluster.orchestrator()
        cluster.wait_running(8)
        paused.signal(signal.SIGSTOP)
        cluster.rollout_worker(concurrency=8)
        wait_until(lambda: cluster.events("lost") >= 4, what="the paused worker's leases to expire")
        open_again = "SELECT count(*) FROM jobs WHERE losses > 0 AND state != 'settled'"
        wait_until(lambda: cluster.ledger(open_again) == [(0,)], what="its jobs to be settled by another worker")
        paused.signal(signal.SIGCONT)
        result = cluster.finish(run)
    assert result["delivered"] == 96
    assert result["fenced"] >= 1


def test_a_wedged_event_loop_loses_its_leases(tmp_path: Path) -> None:
    wedge = tmp_path / "wedge"
    with cluster_in(tmp_path, noop={"rollout_s": 0.3}) as cluster:
        wedge.touch()
        cluster.compute_worker()
        wedged = cluster.rollout_worker(concurrency=8, NOOP_WEDGE_WHILE=str(wedge))
        run = cluster.orchestrator()
        cluster.wait_running(1)
        cluster.rollout_worker(concurrency=8)
        wait_until(lambda: cluster.events("lost") >= 1, what="the wedged worker's leases to expire")
        wedge.unlink()
        result = cluster.finish(run)
        assert "action=lease_withheld" in wedged.text
    assert result["delivered"] == 48


def test_a_stopping_worker_releases_its_jobs_without_counting_failures(tmp_path: Path) -> None:
    patient = {"lease_s": 30.0}  # no lease ends because a busy machine renews it late
    with cluster_in(tmp_path, noop={"rollout_s": 2.0, "stage_s": 0.3}, recovery=patient) as cluster:
        compute = cluster.compute_worker()
        first = cluster.rollout_worker()
        run = cluster.orchestrator()
        cluster.wait_running(16)
        first.signal(signal.SIGQUIT)
        cluster.rollout_worker()
        cluster.wait_running(1, of="-filter")
        compute.signal(signal.SIGQUIT)
        cluster.compute_worker()
        cluster.finish(run)
        assert cluster.events("released") >= 9
        assert cluster.events("lost") == 0
        assert cluster.events("failed") == 0


def test_a_stopping_worker_waits_at_most_drain_s(tmp_path: Path) -> None:
    """Container runtimes kill a process that does not stop in time."""
    with cluster_in(tmp_path, noop={"rollout_s": 300.0}, recovery={"drain_s": 0.5}) as cluster:
        cluster.compute_worker()
        worker = cluster.rollout_worker()
        cluster.orchestrator()
        cluster.wait_running(8)
        worker.signal(signal.SIGTERM)
        worker.wait()
        wait_until(lambda: cluster.events("released") >= 8, what="the rollouts to be released")


def test_a_draining_worker_ends_when_its_run_does(tmp_path: Path) -> None:
    """It hears no remote control. Played to their ends, its rollouts would leave files behind the last sweep."""
    held = tmp_path / "hold"
    held.touch()
    settings = {"batch": {"order": "completion"}, "rollouts": {"oversample": 2.0}, "recovery": {"drain_s": 2 * HANG_S}}
    with cluster_in(tmp_path, **settings) as cluster:
        cluster.compute_worker()
        draining = cluster.rollout_worker(concurrency=2, NOOP_HOLD_WHILE=str(held))
        run = cluster.orchestrator()
        cluster.wait_running(2)
        draining.signal(signal.SIGTERM)
        wait_until(lambda: "draining" in draining.text, what="the worker to drain")
        cluster.rollout_worker()
        cluster.finish(run)
        assert draining.wait() == 0
        assert draining.text.count("the run has ended") >= 2


def test_a_message_delivered_twice_counts_once(tmp_path: Path) -> None:
    with cluster_in(tmp_path, noop={"rollout_s": 0.05}) as cluster:
        cluster.rollout_worker(concurrency=1)
        cluster.compute_worker()
        run = cluster.orchestrator()
        wait_until(lambda: cluster.redis.llen("rollouts") >= 30, what="30 queued rollouts")
        messages = cluster.redis.lrange("rollouts", 0, -1)
        cluster.redis.delete("rollouts")
        cluster.redis.rpush("rollouts", *(message for message in messages for _ in range(2)))
        result = cluster.finish(run)
    assert result["delivered"] == result["planned"] == 48
    assert result["fenced"] >= 15
