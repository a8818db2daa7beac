"""Several session servers under one supervisor: real processes, killed in turn."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import pytest
from support.cluster import Process
from support.processes import alive, free_ports
from support.session_process import READY, Agent, Script, SessionsProcess, scripted
from support.waiting import wait_until
from typer.testing import CliRunner

from headpond.commands.main import app
from headpond.errors import ConfigError


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with scripted() as script:
        yield script


class Several(SessionsProcess):
    """The supervisor; `at` is one of its servers."""

    port: int

    def at(self, number: int) -> "SessionsProcess":
        server = object.__new__(_One)
        server.store, server.port = self.store, self.port + number
        return server

    def pids(self) -> list[int]:
        """Those of the servers, in the order of their starts: the supervisor's guard is a child too."""
        pids = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in pids if b"sessions" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class _One(SessionsProcess):
    port: int

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port


@pytest.fixture
def several(script: Script, tmp_path: Path) -> Iterator[Several]:
    port = free_ports(2)
    process = Several(tmp_path, script.server.url, "--port", str(port), "--processes", "2")
    process.port = port
    wait_until(lambda: len(READY.findall(process.text)) == 2 or process.exit_code is not None)
    assert process.exit_code is None, process.text
    yield process
    Process.end(process)


def test_a_server_that_is_killed_is_back_with_its_sessions(several: Several) -> None:
    agents = [several.at(number).agent() for number in range(2)]
    for number, agent in enumerate(agents):
        assert agent.base_url.startswith(f"http://127.0.0.1:{several.port + number}/")
        agent.talk("before")
    first = several.pids()
    os.kill(first[0], signal.SIGKILL)
    agents[1].talk("meanwhile")
    wait_until(lambda: has_its_turn(agents[0]))
    agents[0].talk("after")
    assert agents[0].request("POST", "/seal").json["turns"] == 2
    assert set(several.pids()) & set(first) == {first[1]}


def test_a_server_that_cannot_start_again_ends_no_other(several: Several) -> None:
    agents = [several.at(number).agent() for number in range(2)]
    agents[0].talk("before")
    with taken_after_kill(several):
        wait_until(lambda: "cannot listen" in several.text)
        wait_until(lambda: several.text.count("action=died process=sessions-") > 1 or several.exit_code is not None)
        agents[1].talk("meanwhile")
    wait_until(lambda: has_its_turn(agents[0]))


def test_a_server_that_cannot_start_the_first_time_ends_all_of_them(script: Script, tmp_path: Path) -> None:
    port = free_ports(2)
    with socket.create_server(("127.0.0.1", port + 1)):
        process = Several(tmp_path, script.server.url, "--port", str(port), "--processes", "2")
        try:
            wait_until(lambda: process.exit_code is not None, what="the end of the command")
            assert process.exit_code == 2
            assert "cannot listen" in process.text
        finally:
            Process.end(process)
    socket.create_server(("127.0.0.1", port)).close()


def taken_after_kill(several: Several) -> socket.socket:
    """The port of the first server, before the next one has it."""
    _, other = several.pids()
    while True:
        for pid in set(several.pids()) - {other}:
            with contextlib.suppress(ProcessLookupError):  # it could not start, and has ended by itself
                os.kill(pid, signal.SIGKILL)
        try:
            return socket.create_server(("127.0.0.1", several.port))
        except OSError:
            wait_until(lambda: len(several.pids()) == 2)


def has_its_turn(agent: Agent) -> bool:
    try:
        return agent.turns() == 1
    except (OSError, HTTPException):
        return False


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_running(several: Several, signum: signal.Signals) -> None:
    pids = several.pids()
    assert len(pids) == 2
    os.kill(several.pid, signum)
    wait_until(lambda: not any(map(alive, pids)))
    wait_until(lambda: several.exit_code is not None)
    assert several.exit_code == (0 if signum != signal.SIGKILL else -signal.SIGKILL)


@pytest.mark.parametrize("arguments", [["--port", "0"], ["--port", "8100", "--instance-id", "a" * 32]])
def test_processes_that_cannot_be_told_apart_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["sessions", "--processes", "2", "--store", f"file://{tmp_path}", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert "--processes" in str(result.exception)
