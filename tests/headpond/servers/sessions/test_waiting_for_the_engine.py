"""While weights are loaded or the engine restarts, an agent's request waits, for a limited time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.session_process import Agent, Script, SessionsProcess, running, scripted
from support.upstream import ReceivedRequest, Response
from support.waiting import HANG_S, wait_until

LOADING = "loading 7@run"


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    """An engine that says which weights it has."""
    with scripted() as script:
        script.server.weights = "0"
        yield script


@pytest.fixture(scope="module")
def sessions(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    with running(tmp_path_factory.mktemp("patient"), script.server.url, sessions__engine_wait_s=str(HANG_S)) as process:
        yield process


def test_an_agents_request_waits_while_weights_are_loaded(script: Script, tmp_path: Path) -> None:
    script.server.weights = LOADING
    with (
        running(tmp_path, script.server.url, sessions__engine_wait_s=str(HANG_S)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        chat = pool.submit(server.agent().talk, "meanwhile")
        wait_until(lambda: server.status()["chats"]["begun"])
        assert not script.received("meanwhile")
        script.server.weights = "7"
        assert chat.result().status == 200
    script.server.weights = "0"


def test_an_agents_request_waits_while_the_engine_answers_503(agent: Agent, script: Script) -> None:
    asked: list[ReceivedRequest] = []

    def paused(request: ReceivedRequest) -> Response:
        asked.append(request)
        return Response(status=503) if len(asked) < 3 else Response(body=script.body(request))

    script.responses["paused"] = paused
    assert agent.talk("paused").status == 200
    assert (len(asked), agent.turns()) == (3, 1)


def test_an_agents_request_waits_while_the_engine_restarts(agent: Agent, script: Script) -> None:
    script.server.stop()
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(agent.talk, "restarted")
        wait_until(lambda: "action=engine_failed" in agent.server.text)
        script.server.start()
        assert chat.result().status == 200


def test_a_request_that_waits_ends_with_its_session(agent: Agent, script: Script) -> None:
    begun = agent.server.status()["chats"]["begun"]
    script.server.stop()
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(agent.chat, "never")
        wait_until(lambda: agent.server.status()["chats"]["begun"] > begun)
        assert agent.request("DELETE").status == 204
        assert chat.result().status == 404
    script.server.start()


@pytest.mark.parametrize("how", ["loading", "503", "away"])
def test_after_the_time_the_agent_learns_the_reason(script: Script, tmp_path: Path, how: str) -> None:
    if how == "loading":
        script.server.weights = LOADING
    elif how == "away":
        script.server.stop()
    else:
        script.responses["hello"] = lambda _: Response(status=503, body=b'{"error":{"message":"paused"}}')
    with running(tmp_path, script.server.url, sessions__engine_wait_s="0.5") as server:
        agent = server.agent()
        response = agent.chat("hello")
        reason = {
            "loading": "'loading 7@run': they were not loaded completely, after 0.5 s (sessions.engine_wait_s)",
            "away": "the engine cannot be reached: Connection refused, after 0.5 s (sessions.engine_wait_s)",
            "503": "paused",
        }[how]
        assert response.status == (503 if how == "503" else 502)
        assert reason in response.json["error"]["message"]
        script.responses.clear()
        script.server.weights = "0"
        if how == "away":
            script.server.start()
        wait_until(lambda: agent.chat("again").status == 200)
