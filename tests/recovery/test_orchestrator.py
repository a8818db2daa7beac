"""The orchestrator is killed at every crash point, paused and drained: the run is resumed where it was."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, cluster_in
from support.waiting import wait_until

from headpond.batches.signals import read_status
from headpond.broker import redis_keys
from headpond.orchestrator.duties.crash_points import POINTS


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Redis and workers for several runs, one after the other."""
    settings = {"noop": {"drop_rate": 0.1}, "advantages": {"estimator": "reinforce_pp"}}  # it has a batch phase
    with cluster_in(tmp_path_factory.mktemp("cluster"), steps=2, **settings) as cluster:
        cluster.rollout_worker()
        cluster.compute_worker()
        yield cluster


@pytest.mark.parametrize("point", [*POINTS, "replies_read:3", "submitted:4"])
def test_a_run_killed_at_any_crash_point_is_resumed(shared: Cluster, point: str) -> None:
    shared.new_run(point)
    crashed = shared.orchestrator(CRASH_AT=point)
    assert crashed.wait() == -signal.SIGKILL
    result = shared.finish(shared.orchestrator())
    assert result["steps"] == 2


def test_duplicate_and_reordered_replies_count_once(shared: Cluster) -> None:
    shared.new_run("replies")
    crashed = shared.orchestrator(CRASH_AT="published:2")
    assert crashed.wait() == -signal.SIGKILL
    stream = wait_until(lambda: next(shared.redis.scan_iter(redis_keys.replies("*")), None), what="replies")
    wait_until(lambda: shared.redis.xlen(stream) >= 32, what="a reply to each of the 32 rollouts")
    replies = [fields for _, fields in shared.redis.xrange(stream)] * 3
    random.Random(7).shuffle(replies)
    shared.redis.delete(stream)
    for fields in replies:
        shared.redis.xadd(stream, fields)
    shared.redis.expire(stream, 600)
    result = shared.finish(shared.orchestrator())
    assert result["fenced"] >= 64


def test_a_paused_orchestrator_declares_no_job_lost(shared: Cluster) -> None:
    shared.new_run("paused")
    # Shorter than the lock's 10 s; longer than a busy machine delays a renewal.
    patient = {"HEADPOND_RECOVERY__LEASE_S": "8"}
    workers = [shared.rollout_worker(**patient), shared.compute_worker(**patient)]
    run = shared.orchestrator(**patient)
    wait_until(lambda: shared.redis.exists(redis_keys.LOCK), what="the lock")
    run.signal(signal.SIGSTOP)
    wait_until(lambda: not shared.redis.exists(redis_keys.LOCK), what="the lock to lapse")
    run.signal(signal.SIGCONT)
    shared.finish(run)
    for worker in workers:
        worker.end()
    lost = shared.ledger("SELECT subject, detail FROM events WHERE action = 'lost'")
    assert lost == []


def test_a_lost_ledger_is_rebuilt_from_the_manifests(shared: Cluster) -> None:
    shared.new_run("lost-ledger")
    crashed = shared.orchestrator(CRASH_AT="delivered")
    assert crashed.wait() == -signal.SIGKILL
    sealed = (shared.store / "batches/step_000000/manifest.json").read_bytes()
    for path in shared.run_dir.glob("ledger.sqlite*"):
        path.unlink()
    result = shared.finish(shared.orchestrator())
    assert result["steps"] == 2
    assert (shared.store / "batches/step_000000/manifest.json").read_bytes() == sealed


@pytest.mark.parametrize("presses", [1, 2])
def test_a_run_that_is_stopped_is_resumed(tmp_path: Path, presses: int) -> None:
    with cluster_in(tmp_path, noop={"rollout_s": 0.5}) as cluster:
        cluster.rollout_worker(concurrency=8)
        cluster.compute_worker()
        run = cluster.orchestrator()
        cluster.wait_running(8)
        for _ in range(presses):
            run.signal(signal.SIGINT)
        assert run.wait() == 0
        stopped = cluster.audit()
        assert stopped["balanced"]
        assert stopped["in_flight"] > 0
        if presses == 1:
            assert cluster.ledger("SELECT count(*) FROM jobs WHERE state = 'submitted'") == [(0,)]
        result = cluster.finish(cluster.orchestrator())
        assert cluster.events("failed") == 0
    assert result["delivered"] == 48


def test_an_unreachable_engine_pauses_the_run_without_counting_failures(tmp_path: Path) -> None:
    down = tmp_path / "engine-down"
    down.touch()
    patient = {"lease_s": 30.0}  # no lease ends because a busy machine renews it late
    with cluster_in(tmp_path, noop={"engine_down_while": str(down)}, recovery=patient) as cluster:
        cluster.rollout_worker()
        cluster.compute_worker()
        run = cluster.orchestrator()
        cluster.wait_waiting_for("engine cannot be reached")
        wait_until(lambda: cluster.ledger("SELECT sum(attempt) FROM kept_jobs")[0][0] >= 48 + 2, what="probes")
        down.unlink()
        result = cluster.finish(run)
        assert cluster.events("failed") + cluster.events("lost") == 0
    assert result["delivered"] == 48


def test_a_run_whose_first_rollouts_all_fail_alike_stops_with_the_error_and_is_resumed(tmp_path: Path) -> None:
    with cluster_in(tmp_path, noop={"failure_rate": 1.0}, batch={"size": 16}) as cluster:
        workers = [cluster.rollout_worker(), cluster.compute_worker()]
        run = cluster.orchestrator()
        assert run.wait() == 2, run.text
        stopped = cluster.status().stopped_by
        assert stopped.startswith("stopped, because the first 32 rollouts died of the same error: ")
        assert "run the same command again" in stopped
        told = read_status(cluster.run_dir)
        assert told is not None
        assert told.why == f"the run has stopped: {stopped}"
        assert cluster.audit()["dead"] == 32
        for worker in workers:
            worker.end()
        cluster.configure(noop={"failure_rate": 0.0}, batch={"size": 16})
        cluster.rollout_worker()
        cluster.compute_worker()
        assert cluster.finish(cluster.orchestrator())["steps"] == 3


def test_failures_are_retried_and_then_dead(tmp_path: Path) -> None:
    settings = {"failure_rate": 0.35, "policy_error_rate": 0.2}
    # Which attempts fail depends on the run's random id: with this many formations no run gives a step up.
    with cluster_in(tmp_path, noop=settings, recovery={"max_failures": 2, "max_formations": 100}) as cluster:
        cluster.rollout_worker()
        cluster.compute_worker()
        result = cluster.finish(cluster.orchestrator())
        policy_errors = cluster.ledger("SELECT count(*) FROM kept_results WHERE result LIKE '%:\"noop\"%'")
    assert result["dead"] > 0
    assert result["steps"] == 3
    assert policy_errors[0][0] > 0


def test_the_status_names_a_missing_trainer(shared: Cluster) -> None:
    shared.new_run("no-trainer")
    run = shared.orchestrator(HEADPOND_TRAINER__MAX_STEPS_AHEAD="1", HEADPOND_STEPS="4")
    text = "step 1 is sealed, and no trainer has acknowledged step 0: start one that reads "
    shared.wait_waiting_for(text)
    run.signal(signal.SIGINT)
    assert run.wait() == 0
    assert shared.audit()["balanced"]
