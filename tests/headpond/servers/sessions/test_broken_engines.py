"""Engines that break HTTP, or answer what was not asked: a session gets its own answer or 502."""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.raw_server import RawServer, http_response, raw_server
from support.session_process import SessionsProcess, running
from support.upstream import ReceivedRequest, answer
from support.waiting import wait_until

from headpond.engines.http.transport import NAME_HEADER

STATUSES = {
    "101": b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
    "099": b"HTTP/1.1 099 Odd\r\nContent-Length: 2\r\n\r\n{}",
    "600": b"HTTP/1.1 600 Odd\r\nContent-Length: 2\r\n\r\n{}",
}


CROSSED: list[socket.socket] = []
STOLEN = json.dumps({"messages": [{"role": "user", "content": "stolen"}]}).encode()


def completion(body: bytes, name: str = "") -> bytes:
    request = ReceivedRequest(method="POST", path="", body=json.loads(body), headers={NAME_HEADER: name})
    return http_response(answer(request, f"answer to {request.messages[-1]['content']}"))


def respond(connection: socket.socket, body: bytes, name: str) -> None:
    text = json.loads(body)["messages"][-1]["content"] if body else ""
    if text in STATUSES:
        connection.sendall(STATUSES[text])
    elif text == "drip":
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            connection.sendall(b" ")
    elif not body:
        connection.sendall(http_response(b"{}", status=b"404 Not Found"))
    elif text == "refused":
        connection.sendall(http_response(b'{"error": "it is too long"}', status=b"400 Bad Request"))
    elif text == "an error crossed" and not CROSSED:
        CROSSED.append(connection)
        connection.sendall(http_response(b'{"error": "words of another session"}', status=b"400 Bad Request"))
    elif text.startswith("crossed"):
        another = name[:-1] + ("0" if name[-1] != "0" else "1") if "named" in text else ""
        connection.sendall(completion(STOLEN, another) + completion(body, name))
    else:
        connection.sendall(completion(body, name))


@pytest.fixture(scope="module")
def engine() -> Iterator[RawServer]:
    with raw_server(respond) as server:
        yield server


@pytest.fixture(scope="module")
def sessions(engine: RawServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionsProcess]:
    with running(tmp_path_factory.mktemp("sessions"), engine.url, engine__versions="announced") as process:
        yield process


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_that_is_none_of_a_response_is_502(sessions: SessionsProcess, status: str) -> None:
    agent = sessions.agent()
    response = agent.chat(status)
    assert response.status == 502
    assert "the engine" in response.error
    agent.assert_usable()


def test_an_engine_that_never_ends_its_response_has_failed(engine: RawServer, tmp_path: Path) -> None:
    """A server of its own: on a busy machine, an engine that does answer may take longer than a second too."""
    settings = {"engine__response_s": "1", "engine__versions": "announced"}
    with running(tmp_path, engine.url, **settings) as process:
        agent = process.agent()
        response = agent.chat("drip")
        assert response.status == 502
        assert "after 1 s (engine.response_s)" in response.error
        assert agent.turns() == 0


@pytest.mark.parametrize("text", ["crossed", "crossed, with the name of another request"])
def test_what_arrives_before_an_answer_is_recorded_by_no_session(sessions: SessionsProcess, text: str) -> None:
    """As if it had come after the last look at the idle connection and before the request was written."""
    agent = sessions.agent()
    agent.talk("mine")
    response = agent.chat(text)
    assert response.status == 502
    assert "does not name its request" in response.error
    assert agent.turns() == 1
    assert sessions.agent().talk("hello").content == "answer to hello"


def test_an_error_that_answers_another_request_reaches_no_session(sessions: SessionsProcess) -> None:
    """Errors have no name: on a connection that others used before, an error may be another request's."""
    agent = sessions.agent()
    agent.talk("mine")
    response = agent.chat("an error crossed")
    assert CROSSED
    assert (response.status, response.content) == (200, "answer to an error crossed")


def test_an_engines_own_error_is_passed_on(sessions: SessionsProcess, engine: RawServer) -> None:
    agent = sessions.agent()
    agent.talk("mine")
    response = agent.chat("refused")
    assert (response.status, response.json) == (400, {"error": "it is too long"})
    agent.assert_usable()


def test_what_an_engine_sends_unasked_is_given_to_no_session(sessions: SessionsProcess, engine: RawServer) -> None:
    one, other = sessions.agent(), sessions.agent()
    one.talk("mine")
    for connection in list(engine.connections):
        with suppress(OSError):  # closed by an earlier test
            connection.sendall(completion(STOLEN))
    if (first := other.chat("hello")).status == 502:  # the bytes came when the connection had been chosen
        first = other.chat("hello")
    assert first.content == "answer to hello"
    assert other.turns() == 1


def test_no_error_names_the_engines_address(script_less: tuple[SessionsProcess, str]) -> None:
    sessions, address = script_less
    agent = sessions.agent()
    for response in (agent.chat("hello"), agent.request("GET", "/v1/models")):
        assert response.status == 502
        assert "the engine cannot be reached" in response.error
        assert address not in response.body.decode()
        assert address.rpartition(":")[2] not in response.body.decode()
    wait_until(lambda: address in sessions.text)


@pytest.fixture
def script_less(tmp_path: Path) -> Iterator[tuple[SessionsProcess, str]]:
    """A session server whose engine is not there, and that engine's address."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = "{}:{}".format(*unused.getsockname())
    with running(tmp_path, f"http://{address}", engine__versions="announced") as process:
        yield process, address
