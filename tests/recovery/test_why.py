"""The fault matrix of `headpond why`: of every fault, the first cause that it names is the right one, within 10 s.

One Redis, one set of workers and one engine for all cells; a cell is a run of its own.
"""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Process
from support.pipeline import Pipeline, pipeline_in
from support.small_disk import SmallDisk, small_disk
from support.waiting import HANG_S, wait_until

from headpond.inspection.why import history, why

SETTINGS: dict[str, Any] = {
    "steps": 1000,
    "batch": {"size": 2, "seq_len": 4096, "max_empty_batches": 1000},
    "rollouts": {"group_size": 4, "max_in_flight": 16},
    "recovery": {"lease_s": 2.0, "max_failures": 1, "drain_s": 5.0},
    "environments.sums": {"use": "arithmetic"},
    "environments.sums.options": {"size": 8},
    "trainer": {"max_steps_ahead": "unlimited"},
    "filters.zero_variance": {"mode": "drop"},
}


class Matrix:
    """Cells share what they do not break; what a cell has broken is started again by the next one that needs it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.cluster = pipeline.cluster
        self._cells = 0
        self.engine_arguments: tuple[str, ...] = ()
        self.workers: dict[str, Process] = {}
        self.run: Process | None = None
        assert pipeline.engine.address

    def begin(self, *, engine: tuple[str, ...] = (), wait: bool = True, **settings: Any) -> Process:
        """A new run, with an engine and workers that work."""
        cluster, pipeline = self.cluster, self.pipeline
        if self.run is not None:
            self.run.end()
        if not cluster.redis_server.running:
            cluster.redis_server.restart()
        cluster.redis.flushall()
        self._cells += 1
        cluster.new_run(f"cell-{self._cells}")
        cluster.store = cluster.directory / "store"
        self._serve(engine)
        host, port = pipeline.engine.address
        urls = {"urls": [f"http://{host}:{port}"], "versions": "announced", "unreachable_s": 30.0, "retries": 0}
        values: dict[str, Any] = SETTINGS | {"engine": urls}
        for key, value in settings.items():
            values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
        cluster.configure(**values)
        self._start_workers()
        self.run = cluster.orchestrator()
        if wait:
            self.wait_step(self.run)
        return self.run

    def wait_step(self, run: Process, step: int = 1) -> None:
        delivered = lambda: self.cluster.status().step >= step  # noqa: E731
        wait_until(lambda: delivered() or run.exit_code is not None, what=f"step {step}")
        assert run.exit_code is None, run.text[-3000:]

    def _serve(self, arguments: tuple[str, ...]) -> None:
        engine = self.pipeline.engine
        if engine.exit_code is None and arguments == self.engine_arguments:
            return
        if engine.exit_code is None:
            engine.end()
        self.pipeline.restart_engine(*arguments)
        self.engine_arguments = arguments

    def _start_workers(self) -> None:
        for kind, start in {"rollouts": self.cluster.rollout_worker, "compute": self.cluster.compute_worker}.items():
            if kind not in self.workers or self.workers[kind].exit_code is not None:
                self.workers[kind] = start()

    def end_workers(self) -> None:
        """For a cell with settings that workers read."""
        for worker in self.workers.values():
            worker.end()

    def assert_named(self, text: str) -> dict[str, Any]:
        """Wait until the first cause has `text`. `--durations` shows how long that takes: a busy machine decides no
        test, and an idle one takes less than 10 s from the fault."""
        url = self.cluster.redis_server.url
        found = wait_until(lambda: self._cause(url, text), timeout_s=HANG_S, what=f"the cause: {text}")
        assert isinstance(found, dict)
        return found

    def _cause(self, url: str, text: str) -> dict[str, Any] | None:
        if not (self.cluster.run_dir / "run.json").exists():
            return None
        found = why(self.cluster.run_dir, url)
        return found if found["causes"] and text in found["causes"][0] else None


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    directory = tmp_path_factory.mktemp("matrix")
    with pipeline_in(directory) as pipeline:
        yield Matrix(pipeline)


def test_a_trainer_that_does_not_acknowledge(matrix: Matrix) -> None:
    matrix.begin(trainer={"max_steps_ahead": 1})
    found = matrix.assert_named("and no trainer has acknowledged step 0: start one that reads")
    assert found["next_step"]["waits_for"] == "trainer"


@pytest.mark.slow
def test_a_paused_trainer(matrix: Matrix) -> None:
    run = matrix.begin(trainer={"max_steps_ahead": 1})
    trainer = matrix.pipeline.trainer()
    matrix.wait_step(run, 3)
    trainer.signal(signal.SIGSTOP)
    found = matrix.assert_named("and the trainer has not acknowledged step")
    assert "it is slow, paused or not running" in found["causes"][0]
    trainer.end()


def test_a_dead_engine(matrix: Matrix) -> None:
    matrix.begin()
    matrix.pipeline.engine.end()
    matrix.assert_named("does not answer (Connection refused)")


def test_no_rollout_worker_and_then_no_compute_worker(matrix: Matrix) -> None:
    matrix.begin()
    matrix.workers["rollouts"].end()
    matrix.assert_named("no worker for the queues rollouts is running: start one: celery -A headpond.workers.rollouts")
    matrix.workers["compute"].end()
    matrix.assert_named("no worker for the queues")


@pytest.mark.slow
def test_a_paused_engine(matrix: Matrix) -> None:
    matrix.begin()
    matrix.pipeline.engine.signal(signal.SIGSTOP)
    matrix.assert_named("does not answer (timed out)")
    matrix.pipeline.engine.end()


@pytest.mark.slow
def test_an_engine_that_refuses_every_request(matrix: Matrix) -> None:
    matrix.begin(engine=("--failures", "error=1"), wait=False)
    matrix.assert_named("500")


@pytest.mark.slow
def test_every_rollout_is_filtered(matrix: Matrix) -> None:
    matrix.begin(engine=("--skill", "1"), wait=False)
    found = matrix.assert_named("was kept (zero_variance")
    assert found["losses"]["dropped"]["zero_variance"] >= 8


@pytest.mark.slow
def test_every_rollout_is_masked(matrix: Matrix) -> None:
    """By the overlong filter's default, of a model that never ends its completions."""
    settings = {"policy.sampling": {"max_tokens": 1}, "filters.zero_variance": {"mode": "monitor"}}
    matrix.end_workers()
    run = matrix.begin(**settings, wait=False)
    found = matrix.assert_named("masked by filters.overlong")
    assert found["losses"]["masked"]["filters.overlong"] >= 8
    run.signal(signal.SIGTERM)
    assert run.wait() == 0
    assert "masked by filters.overlong" in run.text, "the end of the run names it"
    notes = why(matrix.cluster.run_dir, matrix.cluster.redis_server.url)["notes"]
    assert any("masked by filters.overlong" in note for note in notes)
    matrix.end_workers()


@pytest.mark.slow
def test_a_worker_whose_configuration_differs(matrix: Matrix) -> None:
    matrix.begin()
    matrix.workers["rollouts"].end()
    matrix.workers["rollouts"] = matrix.cluster.rollout_worker(HEADPOND_POLICY__MAX_TURNS="3")
    found = matrix.assert_named("takes no jobs: policy.max_turns is")
    assert any(worker["refused"] for worker in found["workers"].values())
    matrix.workers["rollouts"].end()


@pytest.mark.slow
def test_a_changed_setting_that_needs_a_restart(matrix: Matrix) -> None:
    run = matrix.begin()
    run.signal(signal.SIGTERM)
    assert run.wait() == 0
    matrix.run = matrix.cluster.orchestrator(HEADPOND_POLICY__MAX_TURNS="3")
    found = matrix.assert_named("takes no jobs: policy.max_turns is 3 in the run")
    assert any("policy.max_turns was" in note and "restart rollouts" in note for note in found["notes"])


@pytest.mark.slow
def test_the_data_is_used_up(matrix: Matrix) -> None:
    run = matrix.begin(**{"environments.sums": {"epochs": 1}, "batch": {"size": 3}}, wait=False)
    assert run.wait() == 0
    matrix.assert_named("the examples of every environment are used up")


@pytest.mark.slow
def test_redis_is_gone(matrix: Matrix) -> None:
    matrix.begin()
    matrix.cluster.redis_server.kill()
    matrix.assert_named("Redis at")


@pytest.mark.slow
def test_a_killed_orchestrator(matrix: Matrix) -> None:
    run = matrix.begin()
    run.kill()
    found = matrix.assert_named("the orchestrator is not running (its process has died)")
    assert found["step"] >= 1
    open_jobs = [job for group in found["next_step"]["groups"] for job in group["jobs"]]
    assert {(job["state"], job["worker"], job["next"]) for job in open_jobs} <= {
        ("interrupted", None, "it runs again when the run is resumed"),
        ("queued", None, "it runs when the run is resumed"),
        ("waiting", None, "it runs when the run is resumed"),
    }
    matrix.pipeline.engine.end()
    again = why(matrix.cluster.run_dir, matrix.cluster.redis_server.url)
    assert "the orchestrator is not running" in again["causes"][0], "what was lost first comes first"
    assert "does not answer" in again["causes"][1]


@pytest.mark.slow
def test_a_paused_orchestrator(matrix: Matrix) -> None:
    run = matrix.begin()
    run.signal(signal.SIGSTOP)
    matrix.assert_named("the orchestrator has written no status for")
    run.end()


@pytest.mark.slow
def test_slow_rollouts_are_named_with_group_worker_and_age(matrix: Matrix) -> None:
    matrix.begin(engine=("--latency", "constant:600"), wait=False)
    found = matrix.assert_named(f" on worker {worker_of(matrix)}")
    assert "waits for group g00000" in found["causes"][0]
    [job, *_] = found["next_step"]["groups"][0]["jobs"]
    assert (job["queue"], job["state"], job["attempt"]) == ("rollouts", "running", 1)
    url = "http://{}:{}".format(*matrix.pipeline.engine.address)
    found = matrix.assert_named(f", which waits for the engine at {url}")
    assert {job["replica"] for group in found["next_step"]["groups"] for job in group["jobs"]} <= {url, None}
    held = history(matrix.cluster.run_dir, job["job"], matrix.cluster.redis_server.url)["leases"]
    assert [(lease["worker"], lease["replica"]) for lease in held] == [(worker_of(matrix), url)]
    assert "rollouts.timeout_s" in job["next"]


def worker_of(matrix: Matrix) -> str:
    """`host-pid` of the rollout worker."""
    return f"{socket.gethostname()}-{matrix.workers['rollouts'].pid}"


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small") as disk, pipeline_in(tmp_path / "cluster") as pipeline:
        if not isinstance(disk, SmallDisk):
            return  # mounting is not permitted: tests/recovery/test_full_disk.py makes the same calls fail
        matrix = Matrix(pipeline)
        matrix.cluster.enter = disk.enter
        matrix.begin(store=f"file://{disk.directory}/store")
        with disk.full(matrix.workers["rollouts"].pid, "store"):
            matrix.assert_named("store")
