"""`headpond init` and `headpond redis`: files that load and play, a server that keeps its data."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from support.cluster import BIN
from support.engine_process import EngineProcess
from support.waiting import HANG_S, wait_until
from typer.testing import CliRunner

from headpond import config
from headpond.commands.init import FILES, learning_rate
from headpond.commands.main import app, main
from headpond.commands.modules import TEMPLATES
from headpond.environments.loading import load_environments

HEADPOND = str(BIN / "headpond")
ROOT = TEMPLATES.parents[1]


def test_the_files_load_and_the_environment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["init", str(tmp_path / "mine"), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["files"] == list(FILES)
    assert said["next"][-1] == "headpond up run.toml"
    loaded = config.load(tmp_path / "mine" / "run.toml", environ={})
    assert loaded.trainer.command == "python trainer.py {run_dir}"
    assert loaded.recovery.stall_s
    monkeypatch.syspath_prepend(tmp_path / "mine")
    assert load_environments(loaded.environments, loaded.place_of)["sums"].size == 1600
    assert (tmp_path / "mine" / "run.toml").read_text().count("  # ") >= 10, "comments"


def test_the_trainer_without_a_run_says_how_it_is_started(tmp_path: Path) -> None:
    CliRunner().invoke(app, ["init", str(tmp_path / "mine")])
    command = [sys.executable, str(tmp_path / "mine" / "trainer.py")]
    started = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert started.returncode == 1
    assert re.search("^.*trainer.py RUN_DIR.*`run_dir`.*\n$", started.stderr), "one line"
    rollout = (tmp_path / "mine" / "sums.py").read_text().partition("class ")[2]
    assert len(rollout.splitlines()) <= 10


def test_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sums.py").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["headpond", "init", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"headpond: {tmp_path} has a sums.py: choose another directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["sums.py"]


def test_the_engine_section_is_what_the_doctor_finds(tmp_path: Path) -> None:
    engine = EngineProcess(tmp_path, "--layers", "4", "--topk", "2", "--served-model-name", "mine")
    try:
        host, port = engine.address
        url = f"http://{host}:{port}"
        result = CliRunner().invoke(app, ["init", str(tmp_path / "mine"), "--engine", url])
        assert result.exit_code == 0, result.output
    finally:
        engine.end()
    found = config.load(tmp_path / "mine" / "run.toml", environ={}).engine
    assert (found.urls, found.model, found.routed_experts) == ((url,), "mine", True)
    assert (found.hidden_layers, found.experts_per_token, found.versions) == (4, 2, "announced")


@pytest.mark.parametrize(("served", "written"), [(4096, 4096), (65_536, 32_768)])
def test_sequences_are_no_longer_than_those_of_the_server(tmp_path: Path, served: int, written: int) -> None:
    engine = EngineProcess(tmp_path, "--max-model-len", str(served))
    try:
        host, port = engine.address
        result = CliRunner().invoke(app, ["init", str(tmp_path / "mine"), "--engine", f"http://{host}:{port}"])
        assert result.exit_code == 0, result.output
    finally:
        engine.end()
    loaded = config.load(tmp_path / "mine" / "run.toml", environ={})
    assert (loaded.policy.max_seq_len, loaded.policy.sampling.max_tokens) == (written, 512)


def test_what_is_written_passes_the_doctor_and_is_played(tmp_path: Path) -> None:
    """In the new directory, as the quickstart says, without a PYTHONPATH and without Redis."""
    engine = EngineProcess(tmp_path)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HEADPOND", "PYTHONPATH"))}
    try:
        host, port = engine.address
        commands = (["init", "mine", "--engine", f"http://{host}:{port}"], ["doctor", "run.toml"], ["try", "run.toml"])
        for command in commands:
            directory = tmp_path if command[0] == "init" else tmp_path / "mine"
            done = subprocess.run([HEADPOND, *command], cwd=directory, env=variables, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "WRONG" not in done.stdout
    finally:
        engine.end()


@pytest.fixture
def engine_url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "engine").mkdir()
    engine = EngineProcess(tmp_path / "engine", "--model", "tiny-moe")
    try:
        yield "http://{}:{}".format(*engine.address)
    finally:
        engine.end()


def python_with(directory: Path, *packages: str) -> str:
    """A Python that finds these packages, and no others than its own."""
    for package in ("", *packages):
        (directory / "packages" / package).mkdir(parents=True)
    (directory / "packages" / "huggingface_hub.py").write_text("def snapshot_download(id, **_): return f'/hub/{id}'")
    python = directory / "a python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={directory}/packages exec {sys.base_prefix}/bin/python3 -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_with_torch_the_trainer_trains_the_model_of_the_engine(tmp_path: Path, engine_url: str) -> None:
    python = python_with(tmp_path, "torch", "transformers", "numpy", "xxhash")
    done = CliRunner().invoke(app, ["init", str(tmp_path / "mine"), "--engine", engine_url, "--torch", python])
    assert done.exit_code == 0, done.output
    loaded = config.load(tmp_path / "mine" / "run.toml", environ={})
    assert (loaded.engine.weight_update, loaded.engine.versions) == ("headpond", "reported")
    words = shlex.split(loaded.trainer.command or "")
    assert words[:2] == ["env", f"PYTHONPATH={ROOT}"], "this Python has no headpond"
    assert words[2:7] == [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    assert words[8:12] == ["trainer.py", "{run_dir}", "/hub/policy", "{run_dir}/training"]
    assert words[12:] == ["--lr", "1e-6", "--warmup", "10"], "the size of its weights is not known"
    assert (tmp_path / "mine" / "trainer.py").read_text() == (ROOT / "examples" / "grpo_torch.py").read_text()


def test_a_relative_path_of_the_python_with_torch_is_that_of_the_callers_directory(
    tmp_path: Path, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_with(tmp_path, "torch", "transformers", "numpy", "xxhash")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "mine", "--engine", engine_url, "--torch", "./a python"])
    assert done.exit_code == 0, done.output
    command = config.load(tmp_path / "mine" / "run.toml", environ={}).trainer.command
    assert shlex.split(command or "")[2] == python, "the trainer is started in another directory"


@pytest.mark.parametrize(("megabytes", "rate"), [(1, "5e-4"), (1_200, "1e-5"), (16_000, "1e-6")])
def test_the_learning_rate_is_that_of_the_size_of_the_weights(tmp_path: Path, megabytes: int, rate: str) -> None:
    for shard in range(2):
        with (tmp_path / f"model-{shard}.safetensors").open("wb") as file:
            file.truncate(megabytes * 500_000)  # a sparse file
    assert learning_rate(tmp_path) == rate


@pytest.mark.parametrize(
    ("packages", "said"),
    [(("torch", "numpy"), "has no transformers, xxhash: "), ((), "has no torch, transformers, numpy, xxhash: ")],
)
def test_packages_that_the_trainer_needs_are_named(
    tmp_path: Path, engine_url: str, packages: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    python = python_with(tmp_path, *packages)
    command = ["headpond", "init", str(tmp_path / "mine"), "--engine", engine_url, "--torch", python]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"headpond: {python} {said}{python} -m pip install" in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--torch", "python3"], "--torch needs --engine"),
        (["--engine", "URL", "--torch", "/no/such/python"], "--torch /no/such/python: [Errno 2] No such file"),
    ],
)
def test_a_trainer_that_could_not_begin_is_refused(
    tmp_path: Path, engine_url: str, options: list[str], said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = [engine_url if word == "URL" else word for word in options]
    monkeypatch.setattr(sys, "argv", ["headpond", "init", str(tmp_path / "mine"), *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"headpond: {said}" in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


def test_an_engine_that_does_not_answer_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["headpond", "init", str(tmp_path / "mine"), "--engine", "http://127.0.0.1:1"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert not (tmp_path / "mine").exists()


@contextmanager
def served(directory: Path) -> Iterator[dict[str, Any]]:
    """What `headpond redis --json` prints; it is ended by Ctrl-C."""
    command = [HEADPOND, "redis", str(directory / "redis"), "--port", "0", "--json"]
    output = directory / "output"
    with output.open("w") as file:
        server = subprocess.Popen(command, stdout=file, env={"REDIS_PASSWORD": "hunter2"})
    try:
        wait_until(lambda: output.read_text().endswith("}\n") or server.poll() is not None, what="its address")
        yield json.loads(output.read_text())
        server.send_signal(signal.SIGINT)
        assert server.wait(HANG_S) == 0
    finally:
        server.kill()
        server.wait()


def test_redis_keeps_its_data_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    for expected in (None, b"1"):
        with served(tmp_path) as said:
            assert "hunter2" not in said["url"]
            with redis.Redis.from_url(said["url"], password="hunter2") as client:
                assert client.get("a") == expected
                client.set("a", 1)


def test_redis_beyond_this_machine_needs_a_password(tmp_path: Path) -> None:
    command = [HEADPOND, "redis", str(tmp_path / "redis"), "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, env={}, check=False)
    assert done.returncode == 2
    assert "set REDIS_PASSWORD, or bind to 127.0.0.1" in done.stderr
