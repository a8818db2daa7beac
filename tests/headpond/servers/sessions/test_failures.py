"""A failed chat records nothing and releases its claim: the next chat is answered."""

import json
import signal
import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.session_process import CHAT, Agent, Script, SessionsProcess, running
from support.upstream import Response, answer, user
from support.waiting import wait_until

HELLO = {"messages": [user("hello")]}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"hello", "not JSON"),
        (b'{"messages":[{"role":"user","content":NaN}]}', "not JSON"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "not JSON"),
        (b'{"a":' + b"[" * 100_000, "not JSON"),
        ([], "not a JSON object"),
        ("text", "not a JSON object"),
        ({}, "messages must be a list"),
        ({"messages": None}, "messages must be a list"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": "hello"}, "messages must be a list"),
        ({"messages": ["hello"]}, "messages[0] must be an object with a role"),
        ({"messages": [{"content": "hello"}]}, "messages[0] must be an object with a role"),
        ({"messages": [{"role": 1}]}, "messages[0] must be an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        (HELLO | {"n": 2}, "n must be 1"),
        (HELLO | {"n": True}, "n must be 1"),
        (HELLO | {"stream": "yes"}, "stream must be"),
        (HELLO | {"model": ["policy"]}, "model must be"),
        (HELLO | {"temperature": "hot"}, "temperature must be"),
    ],
)
def test_a_bad_request_never_reaches_the_engine(agent: Agent, script: Script, body: Any, why: str) -> None:
    before = len(script.server.received)
    response = agent.request("POST", CHAT, body)
    assert response.status == 400
    assert why in response.error
    assert len(script.server.received) == before
    agent.assert_usable()


@pytest.mark.parametrize("status", [201, 204, 301, 400, 404, 422, 429, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
def test_a_status_other_than_200_is_forwarded(agent: Agent, script: Script, status: int, stream: bool) -> None:
    body = b"" if status == 204 else b'{"error":{"message":"no","code":%d}}' % status
    headers = {"Content-Type": "application/json", "Retry-After": "7", "Location": "http://elsewhere/"}
    script.responses["refuse"] = lambda _: Response(status=status, body=body, headers=headers)
    response = agent.chat("refuse", stream=stream)
    assert (response.status, response.body) == (status, body)
    assert (response.all("retry-after"), response.all("content-type")) == (["7"], ["application/json"])
    assert agent.turns() == 0
    agent.assert_usable()


@pytest.mark.parametrize(
    "broken",
    [
        Response(breaks_off_at=-1),
        Response(body=bytes(100_000), breaks_off_at=0),
        Response(body=bytes(100_000), breaks_off_at=70_000),
        Response(body=bytes(100_000), breaks_off_at=70_000, chunked=True),
        Response(body=b"no gzip", headers={"Content-Encoding": "gzip"}),
    ],
    ids=["before its headers", "before its body", "in its body", "in its chunks", "in another encoding"],
)
def test_a_broken_off_response_is_502_and_releases_the_claim(agent: Agent, script: Script, broken: Response) -> None:
    script.responses["break off"] = lambda _: broken
    response = agent.chat("break off")
    assert response.status == 502
    assert "the engine broke off its response" in response.error
    assert agent.turns() == 0
    agent.assert_usable()


def test_an_unreachable_engine_is_502(agent: Agent, script: Script) -> None:
    agent.talk("hello")
    script.server.stop()
    try:
        response = agent.chat("hello?")
        assert response.status == 502
        assert "the engine cannot be reached" in response.error
        assert agent.request("GET", "/v1/models").status == 502
    finally:
        script.server.start()
    agent.assert_usable()


def test_a_response_without_choices_is_502(agent: Agent, script: Script) -> None:
    script.responses["lie"] = lambda request: Response(body=answer(request, "x", choices=[]))
    for stream in (False, True):
        response = agent.chat("lie", stream=stream)
        assert response.status == 502
        assert "0 choices" in response.error
    assert agent.turns() == 0
    agent.assert_usable()


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_answer_is_503_and_not_recorded(agent: Agent, script: Script, stream: bool) -> None:
    """An SDK repeats the request after a 503. A finished answer would be taken for the policy's."""

    def abort(request: Any) -> Response:
        body = json.loads(script.body(request))
        body["choices"][0]["finish_reason"] = "abort"
        aborted.append(body)
        return Response(body=json.dumps(body).encode())

    aborted = list[Any]()
    script.responses["abort"] = abort
    before = agent.server.status()["chats"]["aborted"]
    response = agent.chat("abort", stream=stream)
    assert response.status == 503
    assert "the engine aborted the completion" in response.error
    assert "mode=keep" in response.error
    assert agent.turns() == 0
    assert agent.server.status()["chats"]["aborted"] == before + 1
    agent.assert_usable()
    sealed = json.loads(agent.request("POST", "/seal").body)
    assert sealed["metrics"]["engine_aborts"] == 1
    (use,) = sealed["replica_uses"].values()
    assert use["tokens"] == sealed["completion_tokens"]
    assert use["lost_tokens"] == len(aborted[0]["choices"][0]["token_ids"]) > 0


def test_rows_of_another_shape_are_502(agent: Agent, script: Script) -> None:
    agent.talk("hello")

    def other_rows(request: Any) -> Response:
        body = json.loads(script.body(request))
        routed = body["choices"][0]["routed_experts"]
        routed["shape"] = [routed["shape"][0], routed["shape"][1] * routed["shape"][2], 1]
        return Response(body=json.dumps(body).encode())

    script.responses["other rows"] = other_rows
    response = agent.chat([*agent.messages, user("other rows")])
    assert response.status == 502
    assert "layers" in response.error
    agent.talk("next")
    assert agent.request("POST", "/seal").status == 200


def test_a_turn_is_recorded_although_its_client_disconnects(agent: Agent, script: Script) -> None:
    answered = threading.Event()
    script.responses["bye"] = lambda request: Response(body=script.body(request), waits_for=answered)
    with closing(agent.server.connect()) as leaving:
        leaving.request("POST", agent.path + CHAT, json.dumps({"messages": [user("bye")]}))
        wait_until(lambda: script.received("bye"))
    assert agent.turns() == 0
    answered.set()
    wait_until(lambda: agent.turns() == 1)
    agent.assert_usable()


def test_a_client_that_disconnects_before_its_body_releases_the_claim(agent: Agent, script: Script) -> None:
    before = len(script.server.received)
    with socket.create_connection(agent.server.address) as client:
        client.sendall(f"POST {agent.path}{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        wait_until(lambda: agent.chat("busy?").status == 409)
    wait_until(lambda: agent.chat("free?").status == 200)
    assert [request.messages[-1]["content"] for request in script.server.received[before:]] == ["free?"]
    agent.assert_usable()


def test_a_body_that_cannot_be_read_is_400(agent: Agent) -> None:
    with socket.create_connection(agent.server.address) as client:
        head = f"POST {agent.path}{CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head.encode() + b"5\r\nhello\r\nnot a length\r\n")
        assert b" 400 Bad Request" in client.recv(1000)
    assert agent.request("POST", CHAT, b"no gzip", Content_Encoding="gzip").status == 400
    agent.assert_usable()


def test_a_failed_write_is_507_and_the_session_stays_usable(agent: Agent) -> None:
    agent.talk("hello")
    log = next(agent.server.store.rglob(f"{agent.id}/.columns*"))
    log.rename(log.with_name("elsewhere"))
    response = agent.chat("lost")
    assert response.status == 507
    assert "cannot write" in response.error
    log.with_name("elsewhere").rename(log)
    agent.assert_usable()
    assert agent.turns() == 2


def test_a_stopping_server_finishes_chats_and_keeps_their_turns(script: Script, tmp_path: Path) -> None:
    answered = threading.Event()
    script.responses["stopping"] = lambda request: Response(body=script.body(request), waits_for=answered)
    with running(tmp_path, script.server.url, sessions__drain_s="20") as process:
        agent, port = process.agent(), str(process.address[1])
        with closing(process.connect()) as connection:
            connection.request("POST", agent.path + CHAT, json.dumps({"messages": [user("stopping")]}))
            wait_until(lambda: script.received("stopping"))
            process.signal(signal.SIGTERM)
            wait_until(lambda: refuses(process))
            answered.set()
            assert connection.getresponse().status == 200
        assert process.wait() == 0
    assert_cancelled_after_drain(script, tmp_path, agent, port)


def assert_cancelled_after_drain(script: Script, directory: Path, agent: Agent, port: str) -> None:
    """A chat that exceeds drain_s is cancelled; after a restart the session has all its other turns."""
    script.responses["hang"] = lambda _: Response(hangs=True)
    with running(directory, script.server.url, "--port", port, sessions__drain_s="0.1") as process:
        agent.server = process
        assert agent.turns() == 1
        with closing(process.connect()) as connection:
            connection.request("POST", agent.path + CHAT, json.dumps({"messages": [user("hang")]}))
            wait_until(lambda: script.received("hang"))
            process.signal(signal.SIGTERM)
            assert process.wait() == 0
    with running(directory, script.server.url, "--port", port) as process:
        agent.server = process
        assert agent.turns() == 1
        agent.assert_usable()


def refuses(process: SessionsProcess) -> bool:
    """Whether new connections are refused. A listening socket that closes resets the connections in its backlog: their
    `connect` fails with ECONNRESET, or rarely hangs, and only the next one is refused."""
    try:
        with socket.create_connection(process.address, timeout=1):
            return False
    except ConnectionRefusedError:
        return True
    except (ConnectionResetError, TimeoutError):
        return False
