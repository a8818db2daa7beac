"""Flower, started with its usual command, shows tasks, states and failures, and no arguments."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from support.cluster import BIN, cluster_in
from support.processes import free_port
from support.waiting import HANG_S, wait_until


def get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=HANG_S) as response:
        return json.loads(response.read())


def responds(port: int) -> bool:
    try:
        get(port, "/api/tasks?limit=1")
    except OSError:
        return False
    return True


def test_flower_shows_tasks_states_and_failures(tmp_path: Path) -> None:
    with cluster_in(tmp_path, noop={"failure_rate": 0.2}, recovery={"max_failures": 9}) as cluster:
        port = free_port()
        command = [str(BIN / "celery"), "-A", "headpond.tasks", "flower", "--address=127.0.0.1", f"--port={port}"]
        cluster.start("flower", *command, FLOWER_UNAUTHENTICATED_API="true")
        wait_until(lambda: responds(port), what="Flower")
        worker = cluster.rollout_worker()
        cluster.compute_worker()
        cluster.finish(cluster.orchestrator())

        tasks: dict[str, dict[str, Any]] = wait_until(lambda: len(shown := get(port, "/api/tasks")) >= 60 and shown)
        failed = [task for task in tasks.values() if task["state"] == "FAILURE"]
        assert {task["state"] for task in tasks.values()} >= {"SUCCESS", "FAILURE"}
        assert {task["name"] for task in tasks.values()} >= {"headpond.rollouts.run", "headpond.filtering.run"}
        assert all("InfrastructureFailure" in task["exception"] for task in failed)
        assert all(task["args"] == "" and task["kwargs"] == "" for task in tasks.values())
        assert "InfrastructureFailure" in worker.text

        workers = get(port, "/api/workers?refresh=true")
        pools = {name: about["stats"]["pool"] for name, about in workers.items()}
        assert sum(pool.get("loop_lag", {}).get("samples", 0) > 0 for pool in pools.values()) == 1
