"""Complete runs with the taskset of examples/: real workers, session server and engine, from examples to batches."""

import json
import signal
from pathlib import Path

from support.cluster import Process
from support.pipeline import Pipeline, pipeline_in
from support.session_process import running
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
TASKSET = {"taskset": "verifiers_taskset", "size": 8}


def test_a_run_with_a_taskset_finishes_despite_engine_failures(tmp_path: Path) -> None:
    with pipeline_in(tmp_path / "pipeline", "--failures", "error=0.1,disconnect=0.05", steps=3) as pipeline:
        host, port = pipeline.engine.address
        directory = pipeline.cluster.directory
        with running(directory, f"http://{host}:{port}", "--engine-routed-experts", store="tasksets/store") as server:
            pipeline.new_run(
                "tasksets",
                sessions={"urls": [server.url]},
                batch={"size": 8, "seq_len": 8192},
                trainer={"max_steps_ahead": "unlimited"},
                recovery={"max_failures": 50},
                **{
                    "environments.sums": {"use": "verifiers"},
                    "environments.sums.options": TASKSET,
                    "environments.short": {"use": "grouped:Shortest"},
                    "environments.short.options": TASKSET,
                },
            )
            cluster = pipeline.cluster
            worker = cluster.rollout_worker(PYTHONPATH=f"{ROOT}:{ROOT / 'examples'}:{Path(__file__).parent}")
            cluster.compute_worker()
            # Loading the package twice takes long and must not count against the time limit of the run.
            wait_until(lambda: "action=worker_ready" in worker.text, what="the worker")
            status = pipeline.finish(cluster.orchestrator())
            assert status["dead"] == 0
            assert server.status()["sessions"]["open"] == 0
            assert_rewards(pipeline)
            assert_failures_were_retried(pipeline)
            children = started_by(worker)
            assert len(children) == 2, "one process per environment"
            worker.signal(signal.SIGTERM)
            assert worker.wait() == 0
            assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def started_by(process: Process) -> list[str]:
    """Children of all its threads."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [pid for children in tasks for pid in children.read_text().split()]


def assert_rewards(pipeline: Pipeline) -> None:
    played = [rollout for manifest in pipeline.manifests.values() for rollout in manifest.plan.rollouts]
    assert {rollout.env for rollout in played} == {"sums", "short"}
    assert all(rollout.columns.key.startswith("rollouts/") and rollout.experts for rollout in played)
    assert {rollout.reward for rollout in played if rollout.env == "sums"} <= {0.0, 0.1, 1.0, 1.1}
    # `short` is scored by groups: the best rollout of a group gets 1, the others less.
    assert max(rollout.reward for rollout in played if rollout.env == "short") == 1.0
    kept = pipeline.cluster.ledger("SELECT result FROM kept_results WHERE result IS NOT NULL")
    results = [json.loads(result) for (result,) in kept]
    assert {name for result in results for name in result["rewards"]} == {"right", "at_once"}
    assert all("characters" in result["metrics"] for result in results)


def assert_failures_were_retried(pipeline: Pipeline) -> None:
    tried = pipeline.cluster.ledger("SELECT max(attempt), sum(failures) FROM kept_jobs WHERE kind = 'play'")
    assert tried[0][0] > 1
    assert tried[0][1] > 0
