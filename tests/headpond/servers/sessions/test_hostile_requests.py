"""Requests of clients that are not trusted: refused with 4xx, at little cost, whatever they hold."""

import gzip
import json
import os
import socket
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from support.session_process import CHAT, Agent, Script, SessionsProcess
from support.upstream import Response, answer, user

BOMB_BYTES = 1 << 28


def nested(levels: int) -> Any:
    return json.loads("[" * levels + "]" * levels)


def cpu_s(server: SessionsProcess) -> float:
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def raw(server: SessionsProcess, request: bytes) -> bytes:
    with socket.create_connection(server.address) as client:
        client.sendall(request)
        return client.recv(100_000)


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """A quarter of a megabyte that decompresses to a thousand times as much. Not made by the import: it takes a second
    of CPU in every process that collects the tests."""
    return gzip.compress(bytes(BOMB_BYTES), 9)


def test_a_compressed_body_is_decompressed_up_to_the_limit(
    agent: Agent, sessions: SessionsProcess, bomb: bytes
) -> None:
    started = time.process_time()
    zlib.decompressobj(wbits=31).decompress(bomb, BOMB_BYTES)
    whole_s, before_s = time.process_time() - started, cpu_s(sessions)
    for path, limit in ((agent.path + CHAT, 1 << 24), ("/sessions", 1 << 18)):
        response = sessions.request("POST", path, bomb, {"Content-Encoding": "gzip"})
        assert response.status == 413
        assert f"more than {limit} bytes" in response.error
    assert cpu_s(sessions) - before_s < whole_s, "two of them were decompressed whole"
    assert sessions.status()["requests_bytes"]["used"] == 0
    agent.assert_usable()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b"no gzip"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-3]),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"more"),
        ("br", b"x"),
        ("gzip, gzip", b"x"),
    ],
)
def test_a_body_that_cannot_be_decompressed_is_400(agent: Agent, encoding: str, body: bytes) -> None:
    assert agent.request("POST", CHAT, body, Content_Encoding=encoding).status == 400
    agent.assert_usable()


@pytest.mark.parametrize("content", [5, True, {"text": "x"}, ["x"], [None], [{"type": "image_url"}]])
def test_content_that_is_no_text_is_400_and_not_sent(agent: Agent, script: Script, content: Any) -> None:
    before = len(script.server.received)
    response = agent.chat([{"role": "user", "content": content}])
    assert (response.status, "messages[0]" in response.error) == (400, True)
    assert len(script.server.received) == before


@pytest.mark.parametrize("levels", [101, 300, 600])
@pytest.mark.parametrize("place", ["content", "extra", "tools", "metadata"])
def test_json_that_is_nested_deeply_is_400(agent: Agent, place: str, levels: int) -> None:
    message = user("x") | ({place: nested(levels)} if place in ("content", "extra") else {})
    fields = {place: nested(levels)} if place in ("tools", "metadata") else {}
    response = agent.request("POST", CHAT, {"messages": [message], **fields})
    assert (response.status, response.error) == (400, "the request is nested deeper than 100 levels")
    agent.assert_usable()


def test_defaults_that_are_nested_deeply_are_400(sessions: SessionsProcess) -> None:
    for levels in (101, 900):
        assert sessions.request("POST", "/sessions", {"sampling": {"x": nested(levels)}}).status == 400


@pytest.mark.parametrize("levels", [101, 300, 600, 1000, 1100])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_message_that_is_nested_deeply_is_502(
    agent: Agent, script: Script, levels: int, stream: bool
) -> None:
    def respond(request: Any) -> Response:
        text = answer(request, {"role": "assistant", "content": "x", "note": "HERE"}).replace(
            b'"HERE"', b"[" * levels + b"]" * levels
        )
        return Response(body=text)

    script.responses["deep"] = respond
    response = agent.chat("deep", stream=stream)
    assert response.status == 502
    assert agent.turns() == 0
    agent.assert_usable()


@pytest.mark.parametrize("rollout", ["a\nb", "a\n", "\r\nX-Own: 1", "a\x00", "\x7f", "\x85", "\u2028"])
def test_a_rollout_has_no_control_characters(sessions: SessionsProcess, rollout: str) -> None:
    response = sessions.request("POST", "/sessions", {"rollout": rollout})
    assert response.status == 400
    assert "rollout" in response.error


@pytest.mark.parametrize(("field", "value"), [("run", "r\n"), ("execution", "e\n"), ("execution", "../x"), ("run", "")])
def test_names_of_directories_are_plain(sessions: SessionsProcess, field: str, value: str) -> None:
    names = {"run": "r", "rollout": "g1", "execution": "e", field: value}
    assert sessions.request("POST", "/sessions", names).status == 400


@pytest.mark.parametrize("host", [b"\xff\xfe", b"a b", b"", b"x/y", b"http://x", b"x:99999999", b"[::1"])
def test_a_host_that_is_no_address_creates_no_session(sessions: SessionsProcess, host: bytes) -> None:
    before = sessions.status()["sessions"]["open"]
    response = raw(sessions, b"POST /sessions HTTP/1.1\r\nHost: " + host + b"\r\nContent-Length: 2\r\n\r\n{}")
    assert response.startswith(b"HTTP/1.1 400 "), response
    assert sessions.status()["sessions"]["open"] == before


@pytest.mark.parametrize("host", ["localhost", "sessions-1.cluster.local:8100", "[::1]:8100", "10.0.0.1:80"])
def test_a_session_has_the_host_that_its_client_named(sessions: SessionsProcess, host: str) -> None:
    created = sessions.request("POST", "/sessions", {}, {"Host": host}).json
    assert created["base_url"] == f"http://{host}/sessions/{created['session_id']}/v1"
