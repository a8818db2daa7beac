"""Files of session servers: several servers in one store, and the leftovers of a killed one."""

from pathlib import Path

import pytest
from support.session_process import Script, running
from support.stores import directory_store
from support.waiting import wait_until
from typer.testing import CliRunner

from headpond.commands.main import app
from headpond.errors import ConfigError
from headpond.servers.sessions.session_directory import SessionDirectory, owner_of


def test_a_killed_server_affects_only_its_own_sessions(script: Script, tmp_path: Path) -> None:
    backend = script.server.url
    with running(tmp_path, backend) as one, running(tmp_path, backend) as other:
        mine, others = one.agent(), other.agent()
        mine.talk("hello")
        others.talk("hello")
        port = str(one.address[1])
        assert others.server.request("GET", mine.path).status == 404, "a client keeps the URL that it was given"
        one.kill()
        others.talk("and")
        with running(tmp_path, backend, "--port", port) as again:
            mine.server = again
            mine.talk("and")
            assert again.status()["counts"]["recovered"] == 1
            first, second = (agent.request("POST", "/seal").json for agent in (mine, others))
            assert first["sample_lengths"] == second["sample_lengths"]
            assert first["columns"]["key"] != second["columns"]["key"]


def test_two_servers_cannot_share_a_directory(tmp_path: Path) -> None:
    SessionDirectory(directory_store(tmp_path), "ab" * 16).lock()
    arguments = ["--port", "0", "--store", f"file://{tmp_path}", "--instance-id", "ab" * 16]
    result = CliRunner().invoke(app, ["sessions", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert "another session server uses" in str(result.exception)


def test_the_directory_is_named_by_instance_id_or_host_and_port() -> None:
    assert owner_of("cd" * 16, 80) == "cd" * 16
    assert owner_of(None, 8100).endswith("-8100")


def test_a_restart_removes_unfinished_files_and_expires_unreadable_sessions(script: Script, tmp_path: Path) -> None:
    instance = ["--instance-id", "ef" * 16]
    with running(tmp_path, script.server.url, *instance) as process:
        sealed, broken, whole = (process.agent() for _ in range(3))
        for agent in (sealed, broken, whole):
            agent.talk("hello")
        files = sealed.request("POST", "/seal").json
        process.kill()
        directory = process.store / "sessions" / ("ef" * 16)
        log = directory / broken.id / ".columns.safetensors.log"
        log.write_bytes(log.read_bytes()[:10])
        (directory / sealed.id / ".columns.safetensors.half").touch()
        (directory / ("0" * 32)).mkdir()
        (directory / ("0" * 32) / ".experts.safetensors.rows").touch()
    with running(tmp_path, script.server.url, *instance) as again:
        for agent in (sealed, broken, whole):
            agent.server = again
        assert again.status()["sessions"]["open"] == 3
        assert (broken.request("GET").status, sealed.request("GET").status, whole.turns()) == (410, 404, 1)
        assert {path.name for path in directory.iterdir()} >= {sealed.id, whole.id}
        assert not list(directory.rglob("*.half"))
        assert not (directory / ("0" * 32)).exists()
        assert (process.store / files["columns"]["key"]).exists()
        whole.assert_usable()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["own directory", "directory of the execution"])
@pytest.mark.parametrize("end", ["deleted", "expired"])
def test_a_seal_that_is_repeated_after_a_kill_has_the_same_answer(
    script: Script, tmp_path: Path, elsewhere: bool, end: str
) -> None:
    """Until the session is deleted or expires; its files stay."""
    arguments = ["--instance-id", "ef" * 16, "--require-secret"]
    of_rollout = {"run": "run", "rollout": "r1", "execution": "e1"} if elsewhere else {}
    with running(tmp_path, script.server.url, *arguments) as process:
        agent = process.agent(**of_rollout)
        agent.talk("hello")
        first = agent.request("POST", "/seal", {"error": "out of time"})
        process.kill()
    settings = {"sessions__idle_s": "1"} if end == "expired" else {}
    with running(tmp_path, script.server.url, *arguments, **settings) as again:
        agent.server = again
        if end == "deleted":
            repeated = agent.request("POST", "/seal", {"error": "out of time"})
            assert (repeated.status, repeated.body) == (200, first.body)
            assert again.request("POST", agent.path + "/seal").status == 401
            assert agent.request("DELETE").status == 204
        wait_until(lambda: not list(again.store.rglob(".sealed.json")))
        wait_until(lambda: again.status()["sessions"]["open"] == 0)
        for name in ("columns", "experts"):
            assert (again.store / first.json[name]["key"]).exists()


def test_a_secret_survives_a_restart_and_is_never_stored(script: Script, tmp_path: Path) -> None:
    arguments = ["--instance-id", "ef" * 16, "--require-secret"]
    with running(tmp_path, script.server.url, *arguments) as process:
        agent, deleted = process.agent(sampling={"temperature": 0.25}), process.agent()
        process.kill()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and agent.secret.encode() in path.read_bytes()]
    with running(tmp_path, script.server.url, *arguments) as again:
        agent.server = deleted.server = again
        assert deleted.request("DELETE").status == 204
        assert not list(again.store.rglob(deleted.id))
        assert again.request("GET", agent.path).status == 401
        assert agent.chat("defaults").status == 200
        assert script.received("defaults")[-1].body["temperature"] == 0.25
