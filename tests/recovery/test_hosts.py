"""One host that is set up wrongly beside a good one: nothing dies there, and the status names it with its error."""

import signal
from pathlib import Path
from typing import Any

from support.cluster import BIN, Cluster, Process, cluster_in
from support.fault_shim import Calls, Faults
from support.pipeline import pipeline_in
from support.waiting import wait_until
from support.wheels import COMMIT, copy_tree

from headpond.version import WRITTEN, release


def _excluded(cluster: Cluster, *texts: str) -> dict[str, str]:
    """Wait until the status excludes a worker for a reason that contains `texts`."""

    def found() -> dict[str, str]:
        excluded: dict[str, str] = cluster.status().excluded_workers
        return {node: why for node, why in excluded.items() if all(text in why for text in texts)}

    return wait_until(found, what=f"an excluded worker: {texts}")


def _dead(cluster: Cluster) -> int:
    return cluster.ledger("SELECT count(*) FROM all_rollouts WHERE state = 'dead'")[0][0]


def _says(process: Process, text: str) -> None:
    wait_until(lambda: text in process.text, what=f"{process.name} to say: {text}")


def test_a_rollout_worker_of_another_run_takes_no_job_until_it_is_restarted(tmp_path: Path) -> None:
    """Rollouts are held until both workers play, so that the run does not end before the second one is admitted."""
    other, hold = tmp_path / "other.toml", tmp_path / "hold"
    other.write_text('[environments.other]\nuse = "noop"\n')
    hold.touch()
    with cluster_in(tmp_path, noop={"hold_while": str(hold)}, recovery={"lease_s": 5.0}) as cluster:
        cluster.compute_worker()
        bad = cluster.rollout_worker(concurrency=8, HEADPOND_CONFIG=str(other))
        run = cluster.orchestrator()
        assert list(_excluded(cluster, "environments.noop.use", "environments.other.use")) == ["rollouts1@test"]
        cluster.wait_waiting_for("rollouts1@test")
        _says(bad, "environments.other.use")
        cluster.rollout_worker(concurrency=8)
        cluster.wait_running(8)
        assert "headpond.rollouts" not in bad.text.partition("ready.")[2]
        bad.kill()
        cluster.rollout_worker(concurrency=8)
        cluster.wait_running(16)
        wait_until(lambda: cluster.status().excluded_workers == {}, what="no excluded worker")
        hold.unlink()
        result = cluster.finish(run)
        assert cluster.events("failed") == cluster.events("lost") == 0
    assert result["delivered"] == result["planned"] == 48


def test_a_compute_worker_without_the_store_is_quarantined_and_named(tmp_path: Path) -> None:
    """It has the same settings, but not the same disk: paths may differ between hosts."""
    elsewhere = tmp_path / "elsewhere"
    patient = {"lease_s": 20.0}  # the good worker counts as there on a busy machine too
    few = {"max_in_flight": 32}
    with cluster_in(tmp_path, steps=12, noop={"stage_s": 0.1}, rollouts=few, recovery=patient) as cluster:
        cluster.rollout_worker(concurrency=8)
        _says(cluster.compute_worker(), "ready.")  # a failure counts for its job while no other worker is there
        bad = cluster.compute_worker(HEADPOND_STORE=f"file://{elsewhere}")
        run = cluster.orchestrator()
        assert list(_excluded(cluster, "quarantined", "elsewhere")) == ["compute2@test"]
        _says(bad, "action=quarantined")
        headpond = cluster.headpond("status", str(cluster.run_dir))
        assert "compute2@test is quarantined" in headpond.text
        assert "elsewhere" in headpond.text
        result = cluster.finish(run)
        assert _dead(cluster) == 0
        assert cluster.events("failed") >= 3
        assert cluster.ledger("SELECT max(failures) FROM kept_jobs")[0][0] <= 1
    assert result["delivered"] == result["planned"] == 192


def test_a_rollout_worker_without_the_store_is_quarantined_and_loses_nothing(tmp_path: Path) -> None:
    """What it recorded would be on its own disk, where no compute worker finds it."""
    patient = {"lease_s": 20.0}
    with pipeline_in(tmp_path) as pipeline:
        pipeline.new_run("run", recovery=patient, steps=6)
        cluster = pipeline.cluster
        cluster.compute_worker()
        _says(cluster.rollout_worker(concurrency=2), "ready.")
        bad = cluster.rollout_worker(concurrency=2, HEADPOND_STORE=f"file://{tmp_path / 'elsewhere'}")
        run, trainer = cluster.orchestrator(), pipeline.trainer()
        [(node, why)] = _excluded(cluster, "quarantined", "elsewhere").items()
        assert node in bad.text
        assert "mount the run's store" in why
        result = pipeline.finish(run, trainer)
        assert _dead(cluster) == 0
        assert cluster.ledger("SELECT count(*) FROM all_rollouts WHERE state = 'dropped'") == [(0,)]
    assert result["delivered"] == 6 * 4 * 4


def test_a_repaired_worker_is_let_in_again_after_a_probe(tmp_path: Path) -> None:
    """In the run that has quarantined it, and without a restart: no file can be opened on its host for a while."""
    host = Faults(tmp_path / "faults")
    with cluster_in(tmp_path, steps=1000, noop={"stage_s": 0.05}, rollouts={"max_in_flight": 32}) as cluster:
        cluster.rollout_worker(concurrency=8)
        cluster.compute_worker()
        bad = cluster.compute_worker(**host.variables)
        with host.failing("EIO", Calls.OPEN, cluster.store):
            run = cluster.orchestrator()
            assert list(_excluded(cluster, "quarantined", "Input/output error")) == ["compute2@test"]
            _says(bad, "action=quarantined")
            assert "action=admitted" not in bad.text
        _says(bad, "action=trial")
        _says(bad, "action=admitted")

        def done() -> int:
            """Jobs after its admission. A message that it declines, because it has failed that job, succeeds too."""
            text = bad.text.partition("action=admitted")[2]
            assert "raised unexpected" not in text
            return text.count("succeeded") - text.count("action=declined")

        wait_until(lambda: done() >= 3, what="jobs after its admission")
        wait_until(lambda: cluster.status().excluded_workers == {}, what="no excluded worker")
        run.signal(signal.SIGINT)
        assert run.wait() == 0, run.text
        assert _dead(cluster) == 0
        assert cluster.audit()["balanced"]


def test_failures_count_when_every_worker_fails(tmp_path: Path) -> None:
    with cluster_in(tmp_path, noop={"failure_rate": 1.0}) as cluster:
        cluster.compute_worker()
        for _ in range(2):
            cluster.rollout_worker(concurrency=8)
        run = cluster.orchestrator()
        assert run.wait() != 0
        assert "died of the same error" in run.text
        assert "fails by configuration (NOOP_FAILURE_RATE)" in run.text
        failures = cluster.ledger("SELECT DISTINCT failures FROM kept_jobs WHERE state = 'dead'")
    assert failures == [(3,)]


def test_workers_that_do_not_have_a_changed_setting_are_refused_after_a_resume(tmp_path: Path) -> None:
    few: dict[str, Any] = {"rollouts": {"max_in_flight": 16}, "noop": {"rollout_s": 0.2}, "steps": 6}
    with cluster_in(tmp_path, **few) as cluster:
        cluster.rollout_worker(concurrency=8)
        old = cluster.compute_worker()
        run = cluster.orchestrator()
        wait_until(lambda: cluster.status().step >= 1, what="a step")
        run.kill()
        cluster.configure(**few, advantages={"estimator": "rloo"})
        run = cluster.orchestrator()
        assert list(_excluded(cluster, "advantages.estimator", "rloo")) == ["compute1@test"]
        _says(old, "advantages.estimator")
        step = cluster.status().step
        cluster.compute_worker()
        result = cluster.finish(run)
    assert step < 6
    assert result["delivered"] == 96


def test_a_worker_of_another_commit_takes_no_job_and_both_commits_are_named(tmp_path: Path) -> None:
    other = copy_tree(tmp_path / "other")
    (other / "headpond" / WRITTEN).write_text(COMMIT)
    with cluster_in(tmp_path / "cluster") as cluster:
        cluster.compute_worker()
        # Through a shell: the fork server of these tests has loaded the clone's package.
        command = f"exec {BIN}/celery -A headpond.workers.rollouts worker -Q rollouts -n other@test -c 8 -l INFO"
        bad = cluster.start("rollout-worker", "sh", "-c", command, PYTHONPATH=str(other))
        run = cluster.orchestrator()
        assert list(_excluded(cluster, release(), COMMIT[:12])) == ["other@test"]
        _says(bad, COMMIT[:12])
        cluster.rollout_worker()
        result = cluster.finish(run)
        assert "headpond.rollouts" not in bad.text.partition("ready.")[2]
    assert result["delivered"] == 48
