"""metrics.jsonl has one line per step, wherever the orchestrator is killed; the HTTP endpoint serves the status."""

import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.cluster import Cluster, cluster_in
from support.small_disk import small_disk
from support.waiting import HANG_S, wait_until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Redis and workers for several runs, one after the other."""
    with cluster_in(tmp_path_factory.mktemp("cluster"), noop={"drop_rate": 0.1}) as cluster:
        cluster.rollout_worker()
        cluster.compute_worker()
        yield cluster


def lines(cluster: Cluster) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cluster.run_dir / "metrics.jsonl").read_text().splitlines()]


def killed(cluster: Cluster, run: str, point: str) -> None:
    cluster.new_run(run)
    assert cluster.orchestrator(CRASH_AT=point).wait() == -signal.SIGKILL


@pytest.mark.parametrize("point", ["encoded:2", "sealed:1", "sealed:2", "delivered:2", "composed:3"])
def test_every_step_has_one_line_wherever_the_orchestrator_is_killed(shared: Cluster, point: str) -> None:
    killed(shared, point, point)
    result = shared.finish(shared.orchestrator())
    assert [line["step"] for line in lines(shared)] == [0, 1, 2]
    assert sum(line["rollouts"] for line in lines(shared)) == result["delivered"] == 48 - result["filtered"]["noop"]
    assert [line["total/rollouts_delivered"] for line in lines(shared)][-1] == result["delivered"]
    assert all(0 < line["reward_mean"] == line["reward_mean/noop"] < 1 for line in lines(shared))
    assert all(line["event_loop_lag/p99"] >= 0 and line["time/step_s"] > 0 for line in lines(shared))


def test_a_torn_line_is_repaired_and_a_lost_ledger_leaves_no_gap(shared: Cluster) -> None:
    killed(shared, "torn", "delivered:2")
    path = shared.run_dir / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    for ledger in shared.run_dir.glob("ledger.sqlite*"):
        ledger.unlink()
    shared.finish(shared.orchestrator())
    assert [line["step"] for line in lines(shared)] == [0, 1, 2]
    assert all(0 < line["reward_mean"] < 1 for line in lines(shared))


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=HANG_S) as response:
        return response.read().decode()


def test_the_endpoint_serves_prometheus_metrics_and_status(tmp_path: Path) -> None:
    patient = {"lease_s": 30.0}  # no lease ends because a busy machine renews it late
    with cluster_in(tmp_path, noop={"rollout_s": 600}, recovery=patient, password="hunter2") as cluster:
        cluster.rollout_worker(concurrency=8)
        run = cluster.orchestrator()
        cluster.wait_running(8)
        is_complete = lambda: cluster.status().states.get("running") == 8 and cluster.status().other_loops  # noqa: E731
        wait_until(is_complete, what="a status with running rollouts and the worker's lag")
        url = cluster.status().http
        assert f"action=http_ready url={url}" in run.text
        text = fetched(f"{url}/metrics")
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert samples["headpond_rollouts", "running"] == samples["headpond_jobs_running",] == 8
        assert samples["headpond_queue_depth", "rollouts"] == 40
        assert samples["headpond_steps_total",] == samples["headpond_policy_version",] == 0
        assert samples["headpond_jobs_total", "survey"] == 1
        lag = {key[1] for key in samples if key[0] == "headpond_event_loop_lag_seconds"}
        assert "orchestrator" in lag
        assert any(process.startswith("rollouts@") for process in lag)
        assert len(samples) < 100
        assert json.loads(fetched(f"{url}/status"))["states"] == {"submitted": 40, "running": 8}
        assert json.loads(fetched(f"{url}/health")) == {"status": "ok"}
        status = cluster.headpond("status", str(cluster.run_dir))
        assert f"http       {url}/metrics, /status, /health" in status.text
        assert ": orchestrator\n" in status.text
        assert ": rollouts@" in status.text
        assert "hunter2" not in text + fetched(f"{url}/status")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(urllib.request.Request(f"{url}/status", method="POST"), timeout=HANG_S)


def test_a_taken_http_port_stops_the_run_before_it_starts(shared: Cluster) -> None:
    shared.new_run("taken")
    refused = shared.orchestrator(HEADPOND_HTTP__PORT=str(shared.redis_server.port))
    assert refused.wait() == 2
    assert re.search(rf"127\.0\.0\.1, port {shared.redis_server.port}: Address already in use", refused.text)
    assert not (shared.run_dir / "ledger.sqlite").exists()
    assert "Traceback" not in refused.text


def test_a_run_works_without_the_endpoint(shared: Cluster) -> None:
    shared.new_run("off")
    run = shared.orchestrator(HEADPOND_HTTP__PORT="off")
    shared.finish(run)
    assert shared.status().http is None
    assert [line["step"] for line in lines(shared)] == [0, 1, 2]


def test_steps_are_delivered_while_the_run_directory_disk_is_full(tmp_path: Path) -> None:
    """Ledger and store are on another disk. The lines of these steps are written when there is space."""
    with small_disk(tmp_path / "disk") as disk, cluster_in(tmp_path, steps=6, noop={"rollout_s": 0.3}) as cluster:
        cluster.enter = disk.enter
        cluster.run_dir = disk.directory / "run"
        cluster.rollout_worker(concurrency=8)
        cluster.compute_worker()
        run = cluster.orchestrator(HEADPOND_LEDGER_DIR=str(tmp_path / "ledger"))
        inside = disk.inside / "run"
        wait_until(lambda: "action=delivered step=0" in run.text, what="a first step")
        with disk.full(run.pid, "run"):
            wait_until(lambda: "action=delivered step=2" in run.text, what="steps without metrics")
            wait_until(
                lambda: "metrics.jsonl" in run.text and "action=duty_failed" in run.text, what="the log to report it"
            )
        assert run.wait() == 0, run.text
        text = (inside / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == list(range(6))
