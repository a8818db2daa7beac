"""`headpond try`: the environments of a configuration against an engine, without Redis."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine_process import HEADPOND, EngineProcess
from support.waiting import HANG_S

ENVIRONMENTS = """
class Echo:
    examples = ["one", "two", "three", "four"]

    async def rollout(self, example, policy):
        messages = [{"role": "user", "content": f"Say {example}."}]
        first = await policy.chat(messages, max_tokens=8)
        await policy.chat([*messages, first.message, {"role": "user", "content": "Again."}], max_tokens=8)
        return 0.5


class Broken(Echo):
    async def rollout(self, example, policy):
        await policy.chat([{"role": "user", "content": "before the mistake"}], max_tokens=8)
        raise KeyError("mistaken")
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path_factory.mktemp("engine"))
    try:
        assert process.address
        yield process
    finally:
        process.kill()


def tried(
    directory: Path, engine: EngineProcess, config: str, *options: str, url: str = ""
) -> subprocess.CompletedProcess[str]:
    (directory / "echoes.py").write_text(ENVIRONMENTS)
    (directory / "run.toml").write_text(config)
    host, port = engine.address
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADPOND_")}
    environ |= {
        "HEADPOND_ENGINE__URLS": url or f"http://{host}:{port}",
        "PYTHONPATH": f"{Path(__file__).parents[3]}:{directory}",
        # No Redis listens there: the command must not need one.
        "HEADPOND_REDIS_URL": "redis://127.0.0.1:1/0",
        "TMPDIR": str(directory),
    }
    return subprocess.run(
        [HEADPOND, "try", "run.toml", *options],
        cwd=directory, env=environ, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


def rollouts(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)["rollouts"]


def test_each_environment_is_played_and_nothing_is_kept(tmp_path: Path, engine: EngineProcess) -> None:
    done = tried(tmp_path, engine, '[environments.echo]\nuse = "echoes:Echo"\n', "--examples", "2", "--json")
    assert done.returncode == 0, done.stderr
    played = rollouts(done)
    assert [(each["environment"], each["example"], each["reward"]) for each in played] == [
        ("echo", 0, 0.5),
        ("echo", 1, 0.5),
    ]
    for each, word in zip(played, ("one", "two"), strict=True):
        assert each["conversations"][0][0] == {"role": "user", "content": f"Say {word}."}
        assert [sample["trained"] > 0 for sample in each["samples"]] == [True] * len(each["samples"])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["echoes.py", "run.toml"]


def test_an_exception_is_shown_with_its_traceback_and_what_was_said_before(
    tmp_path: Path, engine: EngineProcess
) -> None:
    config = '[environments.broken]\nuse = "echoes:Broken"\n'
    done = tried(tmp_path, engine, config, "--examples", "1", "--json")
    assert done.returncode == 1
    [broken] = rollouts(done)
    assert "KeyError" in broken["error"]
    assert 'raise KeyError("mistaken")' in broken["traceback"]
    [conversation] = broken["conversations"]
    assert [message["role"] for message in conversation] == ["user", "assistant"]
    shown = tried(tmp_path, engine, config, "--examples", "1")
    assert shown.returncode == 1
    assert "before the mistake" in shown.stdout
    assert 'raise KeyError("mistaken")' in shown.stdout


def test_a_thought_that_was_cut_off_is_shown_without_a_content(tmp_path: Path) -> None:
    engine = EngineProcess(tmp_path, "--failures", "thought=1")
    try:
        done = tried(tmp_path, engine, '[environments.echo]\nuse = "echoes:Echo"\n', "--examples", "1")
    finally:
        engine.kill()
    assert "(thinks)" in done.stdout
    assert "None" not in done.stdout


def test_an_agent_of_its_own_is_recorded_by_a_session_server_of_the_trial(
    tmp_path: Path, engine: EngineProcess
) -> None:
    done = tried(tmp_path, engine, '[environments.agent]\nuse = "program"\n', "--examples", "1", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    [agent] = rollouts(done)
    assert agent["samples"]
    assert agent["reward"] is not None


@pytest.mark.parametrize("use", ["echoes:Echo", "program"])
def test_the_policy_that_a_run_has_trained_is_played_and_its_version_is_shown(tmp_path: Path, use: str) -> None:
    """An agent's requests go through a session server."""
    engine = EngineProcess(tmp_path)
    try:
        host, port = engine.address
        body = json.dumps({"new_version": "31@658de159a72b"}).encode()
        named = urllib.request.Request(f"http://{host}:{port}/update_weight_version", body)
        urllib.request.urlopen(named, timeout=HANG_S).close()
        config = f'[environments.echo]\nuse = "{use}"\n[engine]\nunreachable_s = 1\n'
        done = tried(tmp_path, engine, config, "--examples", "1")
    finally:
        engine.kill()
    assert done.returncode == 0, done.stdout
    assert f"http://{host}:{port} has version 31 ('31@658de159a72b')" in done.stdout


def test_an_unknown_environment_is_refused_with_the_known_ones(tmp_path: Path, engine: EngineProcess) -> None:
    done = tried(tmp_path, engine, '[environments.echo]\nuse = "echoes:Echo"\n', "--environment", "eco")
    assert done.returncode == 2
    assert "the configuration has only echo" in done.stderr


def test_an_engine_that_is_not_there_is_named_with_its_setting(tmp_path: Path, engine: EngineProcess) -> None:
    config = '[environments.echo]\nuse = "echoes:Echo"\n[engine]\nunreachable_s = 0.1\n'
    done = tried(tmp_path, engine, config, "--examples", "1", url="http://127.0.0.1:1")
    assert done.returncode == 1
    assert "engine.urls" in done.stdout
    assert "Traceback" not in done.stdout
