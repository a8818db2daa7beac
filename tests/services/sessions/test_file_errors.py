"""Files that cannot be written or removed for a while: the session fails, and nothing of it is left afterwards."""

from collections.abc import Iterator

import pytest
from support.fault_shim import Calls, Faults
from support.session_process import SessionsProcess, scripted
from support.waiting import wait_until


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
        assert "Traceback" not in process.text


def files(server: SessionsProcess) -> list[str]:
    return [path.name for path in server.store.rglob("*") if path.is_file() and path.name != ".lock"]


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


def test_a_session_whose_files_cannot_be_moved_leaves_none(server: SessionsProcess, faults: Faults) -> None:
    agent = server.agent(run="run", rollout="g0000001-0", attempt=1, execution="ab" * 6)
    agent.talk("hello")
    with faults.failing("EIO", Calls.RENAME, server.store / "rollouts"):
        assert agent.request("POST", "/seal", {"error": ""}).status == 507
        assert agent.request("DELETE").status == 204
    wait_until(lambda: not files(server), what="its files to be removed")
