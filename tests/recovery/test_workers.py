"""Workers die, pause, wedge and stop: their rollouts run elsewhere, and each counts once."""

import os
import signal
from pathlib import Path

from support.cluster import cluster_in
from support.waiting import wait_until


def test_a_killed_rollout_worker_s_rollouts_run_elsewhere(tmp_path: Path) -> None:
    with cluster_in(tmp_path, noop={"rollout_s": 1.0}) as cluster:
        cluster.compute_worker()
        first = cluster.rollout_worker()
        run = cluster.orchestrator()
        cluster.wait_running(16)
        first.kill()
        cluster.rollout_worker()
        found = cluster.finish(run)
    assert found["delivered"] == found["planned"] == 48


def test_a_killed_compute_worker_and_a_killed_child_lose_nothing(tmp_path: Path) -> None:
    with cluster_in(tmp_path, noop={"stage_s": 0.5}) as cluster:
        cluster.rollout_worker()
        first = cluster.compute_worker(concurrency=2)
        run = cluster.orchestrator()
        cluster.wait_running(1, of="-filter")
        os.kill(first.children()[0], signal.SIGKILL)
        wait_until(lambda: cluster.status().get("step", 0) >= 1, timeout_s=30, what="a step")
        first.kill()
        cluster.compute_worker()
        found = cluster.finish(run)
    assert found["delivered"] == found["planned"] == 48
