"""How many responses the engine sends, beside a server that only sends as many bytes: what the machine allows."""

import asyncio
import contextlib
import multiprocessing
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import orjson

from bench.report import Report, Target, median
from penstock.event_loop import event_loop_factory

PENSTOCK = [sys.executable, "-c", "from cli.main import main; main()"]
ENGINE = ["engine", "--port", "0", "--layers", "48", "--form", "object", "--length", "constant:120"]
READY = re.compile(rb"url=http://127\.0\.0\.1:(\d+)")
SIZES = {"1.3 MB": (2_400, 64), "25 MB": (48_000, 8)}
"""Characters of the prompt, one row of 48 x 8 experts each, and connections."""
SHARE_OF_BARE = 0.5
"""Of the responses a second that a server sends which does nothing but send."""


@dataclass(frozen=True, kw_only=True)
class Server:
    pid: int
    port: int

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Measured:
    per_s: float
    cpu_ms: float
    """Of the server, a response."""


def run(*, quick: bool) -> Report:
    rounds, seconds = (1, 0.3) if quick else (5, 3.0)
    figures, targets = dict[str, float](), list[Target]()
    with _engine() as engine:
        for name, (characters, connections) in SIZES.items():
            request = _request(characters)
            size = _exchange(engine.port, request)
            with _bare_server(size) as bare:
                pairs = [
                    (flood(engine, request, connections, seconds), flood(bare, request, connections, seconds))
                    for _ in range(rounds)
                ]
            ours, bares = [one for one, _ in pairs], [other for _, other in pairs]
            figures[f"{name}: bytes"] = size
            for label, measured in (("engine", ours), ("bare", bares)):
                figures[f"{name}: {label} responses/s"] = median([each.per_s for each in measured])
                figures[f"{name}: {label} CPU ms"] = median([each.cpu_ms for each in measured])
            share = median([one.per_s / other.per_s for one, other in pairs])
            targets.append(
                Target(name=f"{name}: share of bare responses/s", value=share, limit=SHARE_OF_BARE, sense="at least")
            )
    return Report(bench="engine", figures=figures, targets=targets, rounds=rounds, quick=quick)


def flood(server: Server, request: bytes, connections: int, seconds: float) -> Measured:
    """A closed loop: every connection asks again as soon as it has its answer; bodies are not looked at."""
    buffer, responses = memoryview(bytearray(1 << 20)), 0
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as open_sockets:
        for _ in range(connections):
            client = open_sockets.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(request)
            selector.register(client, selectors.EVENT_READ, [0])
        started, cpu_s = time.monotonic(), server.cpu_s()
        while (elapsed_s := time.monotonic() - started) < seconds or not responses:
            for key, _ in selector.select(1):
                client, left = key.fileobj, key.data
                assert isinstance(client, socket.socket)
                received = client.recv_into(buffer)
                left[0] = left[0] - received if left[0] else _body_bytes(bytes(buffer[:received]))
                if not left[0]:
                    responses += 1
                    client.sendall(request)
        return Measured(per_s=responses / elapsed_s, cpu_ms=(server.cpu_s() - cpu_s) * 1000 / responses)


def _body_bytes(head: bytes) -> int:
    """Of the body that begins with this, those that are still to come."""
    headers, _, body = head.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200"), head[:500]
    return int(headers.lower().partition(b"content-length: ")[2].split()[0]) - len(body)


def _exchange(port: int, request: bytes) -> int:
    """Size of the answer."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(request)
        return _body_bytes(client.recv(65536).partition(b"\r\n\r\n")[0] + b"\r\n\r\n")


def _request(characters: int) -> bytes:
    messages = [{"role": "user", "content": "x" * characters}]
    body = orjson.dumps({"messages": messages, "seed": 1, "logprobs": True, "return_token_ids": True})
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@contextlib.contextmanager
def _engine() -> Iterator[Server]:
    process = subprocess.Popen(PENSTOCK + ENGINE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        found = next(filter(None, map(READY.search, process.stderr)))
        yield Server(pid=process.pid, port=int(found[1]))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


@contextlib.contextmanager
def _bare_server(size: int) -> Iterator[Server]:
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_bare, args=(size, its), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield Server(pid=process.pid, port=ours.recv())
    finally:
        process.kill()
        process.join()


def _serve_bare(size: int, parent: Connection) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (size, bytes(size))

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2]))
                writer.write(answer)
                await writer.drain()

    async def serve() -> None:
        server = await asyncio.start_server(answer_all, "127.0.0.1", 0)
        parent.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(serve())
