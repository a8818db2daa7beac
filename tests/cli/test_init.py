"""`penstock init` and `penstock redis`: files that load and play, a server that keeps its data."""

import json
import os
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

from cli.init import FILES
from cli.main import app, main
from penstock import config
from penstock.environments.loading import load_environments

PENSTOCK = str(BIN / "penstock")


def test_the_files_load_and_the_environment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["init", str(tmp_path / "mine"), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["files"] == list(FILES)
    assert said["next"][-1] == "penstock up run.toml"
    loaded = config.load(tmp_path / "mine" / "run.toml", environ={})
    assert loaded.trainer.command == "python trainer.py runs/first"
    assert loaded.recovery.stall_s
    monkeypatch.syspath_prepend(tmp_path / "mine")
    assert load_environments(loaded.environments, loaded.place_of)["sums"].size == 1600
    assert (tmp_path / "mine" / "run.toml").read_text().count("  # ") >= 10, "comments"
    rollout = (tmp_path / "mine" / "sums.py").read_text().partition("class ")[2]
    assert len(rollout.splitlines()) <= 10


def test_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sums.py").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["penstock", "init", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"penstock: {tmp_path} has a sums.py: choose another directory" in capsys.readouterr().err
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


def test_what_is_written_passes_the_doctor_and_is_played(tmp_path: Path) -> None:
    """In the new directory, as the quickstart says, without a PYTHONPATH and without Redis."""
    engine = EngineProcess(tmp_path)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK", "PYTHONPATH"))}
    try:
        host, port = engine.address
        commands = (["init", "mine", "--engine", f"http://{host}:{port}"], ["doctor", "run.toml"], ["try", "run.toml"])
        for command in commands:
            directory = tmp_path if command[0] == "init" else tmp_path / "mine"
            done = subprocess.run([PENSTOCK, *command], cwd=directory, env=variables, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "WRONG" not in done.stdout
    finally:
        engine.end()


def test_an_engine_that_does_not_answer_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", "init", str(tmp_path / "mine"), "--engine", "http://127.0.0.1:1"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert not (tmp_path / "mine").exists()


@contextmanager
def served(directory: Path) -> Iterator[dict[str, Any]]:
    """What `penstock redis --json` prints; it is ended by Ctrl-C."""
    command = [PENSTOCK, "redis", str(directory / "redis"), "--port", "0", "--json"]
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
    command = [PENSTOCK, "redis", str(tmp_path / "redis"), "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, env={}, check=False)
    assert done.returncode == 2
    assert "set REDIS_PASSWORD, or bind to 127.0.0.1" in done.stderr
