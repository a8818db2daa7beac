"""Files that cannot be written or removed for a while: the session fails, and nothing of it is left afterwards."""

import os
import secrets
import shutil
from collections.abc import Iterator

import pytest
from support.fault_shim import Calls, Faults
from support.session_process import Agent, SessionsProcess, scripted
from support.stores import directory_store
from support.waiting import wait_until

from headpond.store import BlobRef


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults") / "control")


@pytest.fixture(scope="module")
def server(faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    with scripted() as script:
        process = SessionsProcess(tmp_path_factory.mktemp("sessions"), script.server.url, variables=faults.variables)
        assert process.address
        yield process
        process.end()


def files(server: SessionsProcess) -> list[str]:
    """By `os.walk`, which passes over directories that go away meanwhile."""
    return [name for _, _, names in os.walk(server.store) for name in names if name != ".lock"]


def test_a_session_that_cannot_be_created_leaves_no_file(server: SessionsProcess, faults: Faults) -> None:
    with faults.failing("ENOSPC", Calls.WRITE, server.store):
        assert server.request("POST", "/sessions", {}).status == 507
        assert faults.failed == 1
    wait_until(lambda: not files(server), what="its file to be removed")
    agent = server.agent()
    agent.assert_usable()
    assert agent.request("DELETE").status == 204


def test_files_of_a_session_that_cannot_be_removed_are_removed_later(server: SessionsProcess, faults: Faults) -> None:
    agent = server.agent()
    agent.talk("hello")
    with faults.failing("ESTALE", Calls.UNLINK, server.store):
        assert agent.request("DELETE").status == 204
        wait_until(lambda: faults.failed >= 3, what="it to be tried again")
        assert files(server)
    wait_until(lambda: not files(server), what="its files to be removed")
    assert agent.request("GET").status == 404


def execution(server: SessionsProcess) -> Agent:
    """A session of a rollout, with one turn. Its files are sealed into the directory of its execution."""
    agent = server.agent(run="run", rollout="g0000001-0", attempt=1, execution=secrets.token_hex(6))
    agent.talk("hello")
    return agent


def test_a_session_that_cannot_be_sealed_leaves_no_file(server: SessionsProcess, faults: Faults) -> None:
    agent = execution(server)
    with faults.failing("EIO", Calls.RENAME, server.store / "rollouts"):
        assert agent.request("POST", "/seal", {"error": ""}).status == 507
        assert agent.request("DELETE").status == 204
    wait_until(lambda: not files(server), what="its files to be removed")


@pytest.mark.parametrize("calls", [Calls.RENAME, Calls.UNLINK, Calls.CLOSE])
def test_a_seal_that_failed_is_repeated_with_every_file(server: SessionsProcess, faults: Faults, calls: Calls) -> None:
    agent = execution(server)
    with faults.failing("ESTALE", calls, server.store):
        assert agent.request("POST", "/seal", {"error": ""}).status in (500, 507)
    sealed = agent.request("POST", "/seal", {"error": ""}).json
    for name in ("columns", "experts"):
        directory_store(server.store).open(BlobRef(**sealed[name]))
        assert sealed[name]["key"].startswith("rollouts/run/g0000001-0/")
    assert agent.request("DELETE").status == 204
    wait_until(lambda: len(files(server)) == 2, what="the sealed files only")
    shutil.rmtree(server.store / "rollouts")


def test_a_server_that_is_killed_while_it_seals_leaves_nothing_in_the_directory_of_sessions(
    server: SessionsProcess, faults: Faults
) -> None:
    """It has written what it seals into the directory of the execution, which the orchestrator sweeps."""
    agent = execution(server)
    with faults.failing("ESTALE", Calls.UNLINK, server.store / "sessions"):
        assert agent.request("POST", "/seal", {"error": ""}).status == 507
        sealed = {path.name for path in (server.store / "rollouts").rglob("*.safetensors")}
        assert sealed == {"columns.safetensors", "experts.safetensors"}
        assert not list((server.store / "sessions").rglob("columns.safetensors"))
    assert agent.request("DELETE").status == 204
    shutil.rmtree(server.store / "rollouts")
