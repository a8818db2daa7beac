import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.session_process import CHAT, Agent, Script, SessionsProcess, running
from support.upstream import user
from support.waiting import HANG_S, wait_until

IDLE_S, REQUEST_S = 4, 2  # longer than a busy machine delays a client


@pytest.fixture(scope="module")
def tight(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    limits = {"idle_s": str(IDLE_S), "request_s": str(REQUEST_S)}
    settings = {f"sessions__{name}": value for name, value in limits.items()}
    with running(tmp_path_factory.mktemp("tight"), script.server.url, **settings) as process:
        yield process


@pytest.fixture(scope="module")
def small(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    limits = {"sessions__requests_bytes": "20000", "engine__received_bytes": "200000"}
    limits |= {"sessions__session_bytes": "400000"}
    with running(tmp_path_factory.mktemp("small"), script.server.url, **limits) as process:
        yield process


def assert_expired(agent: Agent) -> None:
    for method, path in [("GET", ""), ("DELETE", ""), ("POST", "/seal"), ("POST", CHAT), ("GET", "/v1/models")]:
        response = agent.request(method, path)
        assert (response.status, response.error) == (410, f"session expired: session_id={agent.id}")
    wait_until(lambda: not list(agent.server.store.rglob(agent.id)))


def test_an_idle_session_expires_and_its_files_are_removed(tight: SessionsProcess) -> None:
    abandoned, used, sealed, guessed = (tight.agent() for _ in range(4))
    abandoned.talk("hello")
    sealed.talk("hello")
    files = sealed.request("POST", "/seal").json
    before = tight.status()["counts"]["expired"]
    guesses = {401}  # requests with a wrong secret do not keep a session

    def all_have_expired() -> bool:
        assert used.request("GET").status == 200
        guesses.add(guessed.request("POST", "/seal", Authorization="Bearer wrong").status)
        return tight.status()["counts"]["expired"] >= before + 3

    wait_until(all_have_expired)
    assert guesses <= {401, 410}
    assert_expired(abandoned)
    assert_expired(guessed)
    assert used.talk("and still").status == 200
    assert sealed.request("POST", "/seal").status == 410
    assert (tight.store / files["columns"]["key"]).exists(), "sealed files stay"
    assert tight.status()["sessions"]["gone"] >= 2


def test_a_session_over_session_bytes_expires(small: SessionsProcess) -> None:
    agent = small.agent()
    for number in range(100):
        response = agent.chat(f"{number}" + "x" * 900)
        if response.status != 200:
            break
    assert response.status == 410
    assert_expired(agent)


def test_sessions_beyond_max_sessions_are_refused(script: Script, tmp_path: Path) -> None:
    with running(tmp_path, script.server.url, sessions__max_sessions="3") as server:
        created = [server.agent() for _ in range(3)]
        refused = server.request("POST", "/sessions", {})
        assert refused.status == 503
        assert "raise sessions.max_sessions" in refused.error
        created[0].request("DELETE")
        assert server.agent().talk("room again").status == 200


def test_slow_clients_delay_no_others_and_time_out(tight: SessionsProcess) -> None:
    body = json.dumps({"messages": [user("slowly")]}).encode()
    with ExitStack() as slow:
        clients: list[socket.socket] = []
        for agent in [tight.agent() for _ in range(10)]:
            head = f"POST {agent.path}{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            for part in (b"POST ", head.encode() + body[:1]):
                client = slow.enter_context(socket.create_connection(tight.address))
                client.sendall(part)
                clients.append(client)
        quick = tight.agent()
        for number in range(5):
            quick.talk(f"{number}")
        assert tight.status()["requests_bytes"]["used"] < 10_000
        clients[1].settimeout(HANG_S)
        answer = clients[1].recv(1000)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert f"did not arrive within {REQUEST_S} s".encode() in answer


def test_clients_that_do_not_read_delay_no_others(small: SessionsProcess) -> None:
    with ExitStack() as open_sockets:
        for agent in [small.agent() for _ in range(4)]:
            body = json.dumps({"messages": [user("unread " + "x" * 1000)]}).encode()
            client = open_sockets.enter_context(socket.create_connection(small.address))
            client.sendall(
                f"POST {agent.path}{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            wait_until(lambda agent=agent: agent.turns() == 1)
            agent.assert_usable()


def test_chats_wait_for_the_byte_budget_and_all_are_answered(small: SessionsProcess) -> None:
    agents = [small.agent() for _ in range(12)]
    with ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(lambda agent: agent.chat("x" * 1000), agents))
    assert {each.status for each in responses} == {200}
    status = small.status()
    assert 0 == status["answers_bytes"]["used"] < status["answers_bytes"]["most"] <= status["answers_bytes"]["limit"]
    response = agents[0].chat("x" * 15_000)
    assert response.status == 502
    assert "raise engine.received_bytes" in response.error
    agents[0].assert_usable()
