"""The scripted engine and a session server, which all agents use, and the table of what was recorded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import engine_process
from support.real_agents import AGENTS, Recorded, table, version
from support.session_process import SessionsProcess, running

LONGEST = 1_000_000
"""Tokens are bytes here, and the instructions of a coding agent are long."""
LEAVE_OUT = """\
[policy]
max_seq_len = 1_000_000

[sessions.leave_out.titles]
system = "title generator"
"""
played: dict[str, Recorded] = {}


@pytest.fixture(scope="session")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    directory = tmp_path_factory.mktemp("sessions")
    (directory / "agents.toml").write_text(LEAVE_OUT)
    flags = ("--length", "constant:1", "--max-model-len", str(LONGEST))
    with engine_process.running(tmp_path_factory.mktemp("engine"), *flags) as engine:
        host, port = engine.address
        with running(directory, f"http://{host}:{port}", "agents.toml", "--mode", "open") as server:
            yield server


@pytest.fixture(scope="session")
def results() -> dict[str, Recorded]:
    return played


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in table(played, AGENTS):
        terminalreporter.write_line(line)
    for agent in AGENTS:
        if found := played.get(agent.name):
            facts = f"{found.repaired_echoes} echoes repaired, {found.seconds:.1f} s"
            terminalreporter.write_line(f"{agent.name}: {agent.package} {version(agent)}, {facts}")
