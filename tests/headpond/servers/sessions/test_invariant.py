"""Internals of the session server, which runs in this process so that a test can reach them."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from support.stores import directory_store
from support.upstream import Response, Server, answer, serving, user

from headpond.config import RunConfig
from headpond.config.engine import Engine, Policy
from headpond.engines.http.transport import ON_LOOP_BYTES
from headpond.event_loop.loop_lag import LoopLag
from headpond.servers.sessions import chats, engine_queries
from headpond.servers.sessions.backend import Backend
from headpond.servers.sessions.chats import CUT_ON_LOOP_BYTES, is_quick
from headpond.servers.sessions.connections import JsonServer
from headpond.servers.sessions.requests import read_chat
from headpond.servers.sessions.session_directory import SessionDirectory
from headpond.servers.sessions.session_server import SessionServer
from headpond.servers.sessions.session_table import SessionTable


async def send(http: ClientSession, url: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
    async with http.request(method, url, json=body) as response:
        text = await response.read()
        return response.status, json.loads(text) if text else None


@asynccontextmanager
async def listening(handler: Any) -> AsyncIterator[str]:
    runner = web.ServerRunner(JsonServer(handler, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "http://{}:{}".format(*runner.addresses[0])
    await runner.cleanup()


@asynccontextmanager
async def sessions(directory: Path, upstream: str) -> AsyncIterator[tuple[SessionTable, str]]:
    policy = Policy(max_seq_len=1_000_000)
    config = RunConfig(store=f"file://{directory}", engine=Engine(urls=(upstream,)), policy=policy)
    own = SessionDirectory(directory_store(directory), "test")
    own.lock()
    table = SessionTable(own, config, [])
    async with Backend.open(config.engine) as backend:
        server = SessionServer(config, table, backend, LoopLag(process="test"), renderer=None)
        async with listening(server.handle) as url:
            yield table, url


@pytest.mark.parametrize("path", ["chat/completions", "messages/count_tokens"])
def test_large_requests_are_read_in_a_thread_and_small_ones_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    threads: list[str] = []

    def watched(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return read_chat(*args, **options)

    for module in (chats, engine_queries):
        monkeypatch.setattr(module, "read_chat", watched)

    async def main(upstream: Server) -> None:
        async with sessions(tmp_path, upstream.url) as (_, base), ClientSession() as http:
            for size in (10, ON_LOOP_BYTES):
                _, created = await send(http, f"{base}/sessions")
                chat = f"{base}/sessions/{created['session_id']}/v1/{path}"
                assert (await send(http, chat, {"messages": [user("x" * size)]}))[0] == 200

    with serving(lambda request: Response(body=answer(request, "x"))) as upstream:
        asyncio.run(main(upstream))
    assert threads == [threading.current_thread().name.rpartition("_")[0], "headpond-cpu"]


ROUTED = b'"routed_experts":'


@pytest.mark.parametrize(
    ("chunks", "quick"),
    [
        ([b"x" * ON_LOOP_BYTES], True),
        ([b"x" * ON_LOOP_BYTES, b"x"], False),
        ([b"{", ROUTED + b'"', b"x" * ON_LOOP_BYTES], True),  # base64
        ([b"{", ROUTED + b'{"data":"', b"x" * ON_LOOP_BYTES], True),
        ([b"{", ROUTED + b"[[[", b"1," * ON_LOOP_BYTES], False),  # refused, after every number was parsed
        ([b"x" * ON_LOOP_BYTES, ROUTED + b'"'], False),  # many tokens
        ([ROUTED + b'"', b"x" * CUT_ON_LOOP_BYTES], False),  # joining is slow
        ([b"{", b'"routed', b'_experts":"', b"x" * ON_LOOP_BYTES], False),  # in doubt, a thread
    ],
)
def test_responses_that_are_quick_to_read_stay_on_the_loop(chunks: list[bytes], quick: bool) -> None:
    assert is_quick(chunks, ROUTED) is quick


def test_a_bug_of_the_server_is_a_500_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_: web.BaseRequest) -> web.StreamResponse:
        raise RuntimeError("inside")

    async def main() -> None:
        async with listening(broken) as url, ClientSession() as http:
            status, body = await send(http, url)
        text = "internal error of the session server: see action=unexpected in its log"
        assert (status, body) == (500, {"error": {"message": text, "type": "server_error", "code": "server_error"}})

    asyncio.run(main())
    assert "RuntimeError: inside" in caplog.text
