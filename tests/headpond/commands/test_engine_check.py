"""The check of the engine at the start of `headpond run`: what would spoil every rollout is refused before the run."""

import os
import re
from pathlib import Path

import pytest
from support.cluster import Process, cluster_in
from support.engine_process import HEADPOND, EngineProcess
from support.processes import free_port
from support.waiting import wait_until

ROOT = Path(__file__).parents[3]


def started(directory: Path, url: str, **variables: str) -> Process:
    """`headpond run` without Redis, at its end: a start that is not refused before ends there."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADPOND_")}
    environ |= {
        "PYTHONPATH": str(ROOT),
        "HEADPOND_ENGINE__URLS": url,
        "HEADPOND_RUN_DIR": str(directory / "run"),
        "HEADPOND_ENVIRONMENTS__SUMS__USE": "arithmetic",
        "HEADPOND_REDIS_URL": "redis://127.0.0.1:1/0",
        "HEADPOND_RECOVERY__REDIS_PATIENCE_S": "0.1",
        **variables,
    }
    process = Process(f"run-{len(list(directory.iterdir()))}", [HEADPOND, "run"], environ, directory)
    process.wait()
    return process


@pytest.mark.parametrize(
    ("flags", "variables", "fix"),
    [
        (("--served-model-name", "qwen"), {}, "--served-model-name policy"),
        (("--logprobs-mode", "raw_logprobs"), {}, "--logprobs-mode processed_logprobs"),
        ((), {"HEADPOND_ENGINE__ROUTED_EXPERTS": "true"}, "--enable-return-routed-experts"),
        ((), {"HEADPOND_ENGINE__DIALECT": "sglang"}, "is engine.dialect right?"),
    ],
)
def test_an_engine_that_would_spoil_every_rollout_is_refused_before_a_run_directory_exists(
    tmp_path: Path, flags: tuple[str, ...], variables: dict[str, str], fix: str
) -> None:
    process = EngineProcess(tmp_path, *flags)
    try:
        host, port = process.address
        done = started(tmp_path, f"http://{host}:{port}", **variables)
    finally:
        process.kill()
    assert done.exit_code == 2
    assert fix in done.text
    assert "run the same command again" in done.text
    assert not (tmp_path / "run").exists()


def test_a_good_engine_passes_and_an_absent_one_is_left_to_the_run(tmp_path: Path) -> None:
    process = EngineProcess(tmp_path)
    try:
        host, port = process.address
        good = started(tmp_path, f"http://{host}:{port}")
    finally:
        process.kill()
    absent = started(tmp_path, "http://127.0.0.1:1")
    for done in (good, absent):
        assert "Redis at redis://127.0.0.1:1/0 cannot be used" in done.text
    assert "was not checked" not in good.text
    assert re.search(r"was not checked: http://127\.0\.0\.1:1 .*\(Connection refused\)", absent.text)
    assert "was not checked" not in started(tmp_path, "http://127.0.0.1:1", HEADPOND_ENGINE__CHECK="false").text


def test_an_engine_that_refuses_tools_is_noted_in_its_words(tmp_path: Path) -> None:
    """The orchestrator does not know which environments have tools."""
    process = EngineProcess(tmp_path, "--no-enable-auto-tool-choice")
    try:
        done = started(tmp_path, "http://{}:{}".format(*process.address))
    finally:
        process.kill()
    assert "note: environments with tools fail: " in done.text
    assert "requires --enable-auto-tool-choice and --tool-call-parser to be set" in done.text
    assert "Redis at redis://127.0.0.1:1/0 cannot be used" in done.text


def test_a_dialect_that_prints_does_not_disturb_the_check(tmp_path: Path) -> None:
    code = 'from headpond.engines.dialects.vllm import Vllm\n\nprint("loaded")\n\n\nclass Loud(Vllm):\n    pass\n'
    (tmp_path / "loud.py").write_text(code)
    process = EngineProcess(tmp_path)
    try:
        host, port = process.address
        variables = {"HEADPOND_ENGINE__DIALECT": "loud:Loud", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
        done = started(tmp_path, f"http://{host}:{port}", **variables)
    finally:
        process.kill()
    assert "Traceback" not in done.text
    assert "Redis at redis://127.0.0.1:1/0 cannot be used" in done.text


@pytest.mark.parametrize(("flags", "passes"), [((), True), (("--logprobs-mode", "raw_logprobs"), False)])
def test_an_engine_that_was_away_is_checked_before_the_first_rollout(
    tmp_path: Path, flags: tuple[str, ...], passes: bool
) -> None:
    port = free_port()
    settings = {
        "steps": 1,
        "batch": {"size": 1},
        "rollouts": {"group_size": 2},
        "engine": {"urls": [f"http://127.0.0.1:{port}"], "check": True},
        "filters.zero_variance": {"mode": "monitor"},
        "environments.sums": {"use": "arithmetic"},
    }
    with cluster_in(tmp_path, **settings) as cluster:
        cluster.rollout_worker()
        cluster.compute_worker()
        orchestrator = cluster.orchestrator(HEADPOND_ENGINE__CHECK="true")
        cluster.wait_waiting_for("rollouts begin when it answers and has been checked")
        wait_until(lambda: cluster.status().states.get("planned"), what="rollouts to be planned")
        engine = EngineProcess(tmp_path, "--port", str(port), *flags)
        try:
            if passes:
                assert orchestrator.wait() == 0, orchestrator.text[-3000:]
            else:
                assert orchestrator.wait() == 2
                assert "--logprobs-mode processed_logprobs" in orchestrator.text
                assert cluster.ledger("SELECT max(attempt) FROM jobs WHERE kind = 'play'") == [(0,)]
        finally:
            engine.kill()
