"""Real `celery` commands that would swallow jobs are refused at start; the names of workers differ."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import BIN, Cluster, Process, cluster_in
from support.waiting import HANG_S, wait_until

from headpond.errors import ConfigError
from headpond.tasks import app

ROLLOUTS = "celery -A headpond.workers.rollouts worker -Q rollouts"
COMPUTE = "celery -A headpond.workers.compute worker -Q filtering,advantages,encoding"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_in(tmp_path_factory.mktemp("cluster"), appendonly=False) as cluster:
        yield cluster


def _celery(cluster: Cluster, *arguments: str) -> Process:
    return cluster.start("worker", str(BIN / "celery"), "-A", *arguments)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        pytest.param("headpond.workers.rollouts worker -P threads -c 2", ROLLOUTS, id="threads"),
        pytest.param("headpond.workers.rollouts worker -Q rollouts -P solo", ROLLOUTS, id="solo"),
        pytest.param("headpond.workers.compute worker -P threads -c 2", COMPUTE, id="compute-threads"),
        pytest.param("headpond.workers.compute worker -Q rollouts -c 1", ROLLOUTS, id="compute-rollouts"),
        pytest.param("headpond.workers.compute worker -Q encoding,rollouts -c 1", ROLLOUTS, id="compute-both"),
        pytest.param("headpond.workers.rollouts worker -Q filtering", COMPUTE, id="rollouts-filtering"),
        pytest.param("tasks worker", ROLLOUTS, id="no-app"),
        pytest.param("tasks worker -Q encoding", COMPUTE, id="no-app-encoding"),
    ],
)
def test_a_worker_that_would_swallow_jobs_is_refused_with_the_right_command(
    cluster: Cluster, arguments: str, command: str
) -> None:
    worker = _celery(cluster, *arguments.split())
    assert worker.wait() == 1, worker.text
    assert command in worker.text
    assert "Traceback" not in worker.text


def test_workers_of_one_machine_have_different_names(cluster: Cluster) -> None:
    commands = [
        "headpond.workers.rollouts worker -c 1",
        "headpond.workers.rollouts worker -c 1",
        "headpond.workers.compute worker -c 1",
    ]
    commands.append("headpond.workers.rollouts worker -c 1 -n mine@test")
    workers = [_celery(cluster, *command.split(), "-l", "INFO") for command in commands]
    ready = re.compile(r"(\S+@\S+) ready\.")
    names = [wait_until(lambda worker=worker: ready.search(worker.text), what="ready")[1] for worker in workers]
    assert len(set(names)) == len(names)
    kinds = ["rollouts", "rollouts", "compute"]
    assert [name.split("@")[0] for name in names[:3]] == [f"{k}-{w.pid}" for k, w in zip(kinds, workers, strict=False)]
    assert names[3] == "mine@test"
    queues = [re.findall(r"\.> (\w+) +exchange=", worker.text) for worker in workers]
    assert list(map(sorted, queues)) == [
        ["rollouts"],
        ["rollouts"],
        ["advantages", "encoding", "filtering"],
        ["rollouts"],
    ]
    for worker in workers:
        worker.end()


def test_remote_control_does_not_look_like_loss(tmp_path: Path) -> None:
    patient = {"lease_s": 30.0}  # no lease ends because a busy machine renews it late
    with cluster_in(tmp_path, steps=4, noop={"rollout_s": 0.3}, recovery=patient) as cluster:
        compute = cluster.compute_worker()
        worker = cluster.rollout_worker(concurrency=8)
        run = cluster.orchestrator()
        cluster.wait_running(8)
        wait_until(lambda: "compute0@test ready." in compute.text, what="the compute worker to listen")
        both = "compute0@test,rollouts1@test"
        controls = {
            "rate_limit headpond.rollouts.run 1/m": both,
            "rate_limit headpond.filtering.run 1/m": both,
            "pool_shrink 2": "rollouts1@test",
            "add_consumer filtering": both,
            "cancel_consumer rollouts": both,
            "add_consumer rollouts": both,
        }
        answers: list[str] = []
        for control, names in controls.items():
            # With names it ends when all of them have answered; without, it ends with the answers of one second.
            command = [
                "-A",
                "headpond.tasks",
                "control",
                "--timeout",
                str(HANG_S),
                "--destination",
                names,
                *control.split(),
            ]
            process = cluster.start("control", str(BIN / "celery"), *command)
            process.wait()
            answers.append(process.text)
        assert "no rate limits" in answers[0]
        assert "serves only" in answers[3]
        result = cluster.finish(run)
        assert cluster.events("lost") == 0, worker.text[-3000:]
    assert result["delivered"] == result["planned"] == 64


def test_a_coroutine_task_fails_on_any_other_pool() -> None:
    """Celery's tracer, which every other pool runs, calls the task itself."""
    for name in ("headpond.rollouts.run", "headpond.rollouts.score", "headpond.rollouts.survey"):
        with pytest.raises(ConfigError, match=ROLLOUTS):
            app.tasks[name]({})
