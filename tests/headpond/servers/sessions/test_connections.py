"""Clients that open connections and say nothing exclude no others."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.session_process import CHAT, Script, SessionsProcess, running
from support.waiting import HANG_S, wait_until

from headpond.processes import descriptors


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    descriptors.raise_to(4096, lower="the number of sockets")
    with ExitStack() as stack:
        yield stack


def silent(stack: ExitStack, server: SessionsProcess, count: int, sent: bytes = b"") -> list[socket.socket]:
    clients = [stack.enter_context(socket.create_connection(server.address)) for _ in range(count)]
    for client in clients:
        client.settimeout(HANG_S)
        client.sendall(sent)
    return clients


def test_1100_silent_sockets_close_no_server_that_may_open_1024_files(
    script: Script, tmp_path: Path, stack: ExitStack
) -> None:
    with running(tmp_path, script.server.url, files=1024) as server:
        agent = server.agent()
        silent(stack, server, 1100)
        for _ in range(3):
            agent.talk("hello")
        assert "action=few_descriptors may_open=1024" in server.text
        wait_until(lambda: "action=connections_closed" in server.text)


def test_the_limit_is_raised_as_far_as_it_may_be(script: Script, tmp_path: Path) -> None:
    limits = {"sessions__connections": "3000", "engine__connections": "1000"}
    with running(tmp_path, script.server.url, **limits) as server:
        wait_until(lambda: server.address)
        soft = Path(f"/proc/{server.pid}/limits").read_text().partition("Max open files")[2].split()[0]
        assert int(soft) >= descriptors.BASE + 4000


def test_the_connection_that_is_idle_longest_makes_room(script: Script, tmp_path: Path, stack: ExitStack) -> None:
    limits = {"sessions__connections": "50", "sessions__address_connections": "20"}
    with running(tmp_path, script.server.url, **limits) as server:
        agent = server.agent()
        first, *_ = silent(stack, server, 20)
        (busy,) = silent(stack, server, 1, f"POST {agent.path}{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9".encode())
        busy.sendall(b"\r\n\r\n{")
        assert first.recv(1) == b"", "closed"
        wait_until(lambda: agent.chat("busy?").status == 409)
        silent(stack, server, 40)
        busy.sendall(b"}       ")
        assert busy.recv(1000).startswith(b"HTTP/1.1 400 "), "a connection with a request stays"
        agent.assert_usable()


def test_a_head_that_does_not_arrive_ends_its_connection(script: Script, tmp_path: Path, stack: ExitStack) -> None:
    with running(tmp_path, script.server.url, sessions__request_s="1") as server:
        clients = [*silent(stack, server, 2), *silent(stack, server, 2, b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")]
        assert [client.recv(1) for client in clients] == [b""] * 4
        assert server.request("GET", "/health").status == 200
