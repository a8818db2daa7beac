"""Errors at the start of a run: it stops or waits with a message that names the cause, and nothing is lost."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Process
from support.pipeline import Pipeline, pipeline_in
from support.small_disk import small_disk
from support.waiting import wait_until

from headpond.inspection.why import why


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    settings = {"trainer": {"max_steps_ahead": "unlimited"}, "steps": 2}
    with pipeline_in(tmp_path_factory.mktemp("pipeline"), **settings) as pipeline:
        yield pipeline


def refused(run: Process) -> str:
    """The last line of a run that ends with exit code 2."""
    assert run.wait() == 2, run.text
    assert "Traceback" not in run.text
    return run.text.splitlines()[-1]


def test_an_environment_that_raises_stops_the_run_until_it_is_fixed(pipeline: Pipeline) -> None:
    pipeline.new_run("bad-environment", **{"environments.sums": {"use": "chess:Chess"}})
    cluster = pipeline.cluster
    module = cluster.directory / "chess.py"
    module.write_text("raise OSError('the openings are missing')\n")
    path = f"{Path(__file__).parents[2]}:{cluster.directory}"
    worker = cluster.rollout_worker(PYTHONPATH=path)
    message = refused(cluster.orchestrator())
    assert re.search("'sums' .*3 failures", message)
    assert re.search("'chess:Chess' .*OSError: the openings are missing", message)
    worker.end()
    module.write_text("from headpond.environments.builtin.arithmetic import Arithmetic as Chess\n")
    cluster.rollout_worker(PYTHONPATH=path)
    cluster.compute_worker()
    assert pipeline.finish(cluster.orchestrator())["delivered"] > 0


def test_a_worker_without_configuration_names_the_missing_environment(pipeline: Pipeline) -> None:
    pipeline.new_run("unconfigured", **{"environments.chess": {"use": "arithmetic"}})
    cluster = pipeline.cluster
    empty = cluster.directory / "empty.toml"
    empty.write_text("")
    cluster.rollout_worker(HEADPOND_CONFIG=str(empty))
    run = cluster.orchestrator()
    cluster.wait_waiting_for("environments.chess.use is 'arithmetic' in the run, unset in this worker")
    cluster.rollout_worker()
    cluster.compute_worker()
    assert pipeline.finish(run)["dead"] == 0


def test_the_run_waits_for_an_engine_that_is_not_up_yet(pipeline: Pipeline) -> None:
    pipeline.new_run("no-engine")
    cluster = pipeline.cluster
    pipeline.engine.kill()
    cluster.rollout_worker()
    cluster.compute_worker()
    run = cluster.orchestrator()
    cluster.wait_waiting_for("the engine cannot be reached (EngineUnreachable: ")
    pipeline.restart_engine("--layers", "4")
    result = pipeline.finish(run)
    assert result["dead"] == 0
    assert result["delivered"] > 0


def test_the_run_waits_for_a_full_store_and_no_rollout_dies(pipeline: Pipeline, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        pipeline.new_run("full-disk")
        cluster = pipeline.cluster
        settings = cluster.config.read_text()
        cluster.config.write_text(settings.replace(f"file://{cluster.store}", f"file://{disk.directory}/store"))
        cluster.enter = disk.enter
        try:
            run = cluster.orchestrator()
            wait_until(lambda: cluster.status().at, what="the run to begin")
            (disk.inside / "store" / "rollouts").mkdir()
            with disk.full(run.pid, "store/rollouts"):
                cluster.rollout_worker()
                cluster.wait_waiting_for(
                    "a worker cannot write to the store: free space or repair the disk (BlobUnwritten: "
                )
            cluster.compute_worker()
            assert run.wait() == 0, run.text[-2000:]
        finally:
            cluster.enter = []
    assert cluster.ledger("SELECT count(*) FROM all_rollouts WHERE state = 'dead'") == [(0,)]
    assert cluster.ledger("SELECT count(*) > 0 FROM all_rollouts WHERE state = 'delivered'") == [(1,)]


BLOCKING = """
import time

class Blocking:
    examples = ["hello"]

    async def rollout(self, example, policy):
        time.sleep(0.3)
        await policy.chat([{"role": "user", "content": example}])
        return 1.0
"""


def test_the_status_names_code_that_blocks_a_worker_loop(pipeline: Pipeline) -> None:
    pipeline.new_run("blocking", **{"environments.sums": {"use": "blocking:Blocking"}})
    cluster = pipeline.cluster
    (cluster.directory / "blocking.py").write_text(BLOCKING)
    path = f"{Path(__file__).parents[2]}:{cluster.directory}"
    cluster.rollout_worker(PYTHONPATH=path, HEADPOND_LAG__TRACE_S="0.05")
    cluster.orchestrator()

    def named() -> bool:
        others = cluster.status().other_loops.values()
        return any("Blocking.rollout (" in culprit for lag in others for culprit in lag["blockers"])

    wait_until(named, what="the status to name the blocker")
    text = cluster.headpond("status", str(cluster.run_dir)).text
    assert f"by Blocking.rollout ({cluster.directory.name}/blocking.py:8)" in text


HELD = """
import itertools, pathlib, time

class Held:
    examples = ["hello"]
    numbers = itertools.count()

    async def rollout(self, example, policy):
        await policy.chat([{"role": "user", "content": example}])
        while pathlib.Path("HOLD").exists(): time.sleep(0.05)
        return float(next(self.numbers) % 2)
"""


def test_a_worker_whose_loop_is_blocked_is_named_with_the_line_until_it_goes_on(pipeline: Pipeline) -> None:
    settings = {"environments.sums": {"use": "held:Held"}, "recovery": {"max_losses": 1000}}
    pipeline.new_run("held", steps=1000, **settings)
    cluster = pipeline.cluster
    hold, module = cluster.directory / "hold", cluster.directory / "held.py"
    hold.touch()
    module.write_text(HELD.replace("HOLD", str(hold)))
    worker = cluster.rollout_worker(PYTHONPATH=f"{Path(__file__).parents[2]}:{cluster.directory}")
    cluster.compute_worker()
    run = cluster.orchestrator()
    at = f" s by Held.rollout ({cluster.directory.name}/held.py:10)"
    cluster.wait_waiting_for(at)
    wait_until(lambda: f"the event loop is blocked{at.removeprefix(' s')}" in worker.text, what="its log")
    causes = why(cluster.run_dir, cluster.redis_server.url)["causes"]
    assert causes[0].startswith("the event loop of worker rollouts")
    assert [at in cause for cause in causes].count(True) == 1
    assert not any("queues rollouts is running" in cause for cause in causes)
    assert "Held.rollout" in cluster.headpond("status", str(cluster.run_dir)).text
    hold.unlink()
    wait_until(lambda: at not in str(cluster.status().waiting_for), what="the cause to go")
    assert run.exit_code is None, run.text[-2000:]


ENDING = r"""
import asyncio, sys

class Ending:
    examples = list(range(40))

    async def rollout(self, example, policy):
        match example % 4:
            case 0:
                sys.exit("enough")
            case 1:
                raise asyncio.CancelledError
            case 2:
                raise ValueError("the file \udcff.txt")
        completion = await policy.chat([{"role": "user", "content": f"hello {example}"}])
        return float(len(completion.content) % 7)
"""


def test_an_environment_that_ends_its_task_or_raises_bad_unicode_uses_up_its_failures(pipeline: Pipeline) -> None:
    pipeline.new_run("ending", steps=1, **{"environments.sums": {"use": "ending:Ending", "order": "in_order"}})
    cluster = pipeline.cluster
    (cluster.directory / "ending.py").write_text(ENDING)
    worker = cluster.rollout_worker(PYTHONPATH=f"{Path(__file__).parents[2]}:{cluster.directory}")
    cluster.compute_worker()
    assert pipeline.finish(cluster.orchestrator())["delivered"] > 0
    assert worker.exit_code is None
    dead = cluster.ledger("SELECT DISTINCT error FROM kept_results WHERE state = 'dead'")
    for text in (
        "SystemExit: enough",
        "CancelledError: the environment cancelled its own task",
        r"the file \udcff.txt",
    ):
        assert any(text in error for (error,) in dead), dead
    assert cluster.ledger("SELECT max(attempt), max(failures) FROM kept_jobs WHERE kind = 'play'") == [(3, 3)]
