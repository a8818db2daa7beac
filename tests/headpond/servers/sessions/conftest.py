"""One server process and one scripted upstream for the tests of a module."""

from collections.abc import Iterator

import pytest
from support.session_process import Agent, Script, SessionsProcess, running, scripted


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with scripted() as script:
        yield script


@pytest.fixture(scope="module")
def sessions(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    with running(tmp_path_factory.mktemp("sessions"), script.server.url) as process:
        yield process


@pytest.fixture
def agent(sessions: SessionsProcess) -> Agent:
    return sessions.agent()
