"""`python -m bench engine`: responses per second of the simulated engine, against a server that only sends bytes.

The bare server sends responses of the same size, which is the upper limit on this machine.
"""

import contextlib
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from bench.harness.procfs import cpu_s
from bench.harness.report import Report, Target, median
from headpond.processes.child_process import ChildProcess, listening_port

ENGINE = ["headpond", "engine", "--port", "0", "--layers", "48", "--form", "object", "--length", "constant:120"]
SIZES = {"1.3 MB": (2_400, 64), "25 MB": (48_000, 8)}
"""characters of the prompt (one row of 48 x 8 experts each), and connections"""
SHARE_OF_BARE = 0.5
"""of the bare server's responses per second"""


@dataclass(frozen=True, kw_only=True)
class Server:
    pid: int
    port: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    per_s: float
    cpu_ms: float
    """of the server, per response"""


def run(*, quick: bool) -> Report:
    rounds, seconds = (1, 0.3) if quick else (5, 3.0)
    figures, targets = dict[str, float](), list[Target]()
    with running(ENGINE) as engine:
        for name, (characters, connections) in SIZES.items():
            request = _request(characters)
            size = _body_bytes(_first_bytes(engine.port, request))
            with running(["python", "-m", "bench.harness.bare_server", str(size)]) as bare:
                pairs = [
                    (flood(engine, request, connections, seconds), flood(bare, request, connections, seconds))
                    for _ in range(rounds)
                ]
            figures[f"{name}: bytes"] = size
            for label, measured in zip(("engine", "bare"), zip(*pairs, strict=True), strict=True):
                figures[f"{name}: {label} responses/s"] = median([each.per_s for each in measured])
                figures[f"{name}: {label} CPU ms"] = median([each.cpu_ms for each in measured])
            share = median([ours.per_s / bare.per_s for ours, bare in pairs])
            targets.append(
                Target(name=f"{name}: share of bare responses/s", value=share, limit=SHARE_OF_BARE, sense="at least")
            )
    return Report(bench="engine", figures=figures, targets=targets, rounds=rounds, quick=quick)


def flood(server: Server, request: bytes, connections: int, seconds: float) -> Measured:
    """A closed loop: every connection sends its next request as soon as it has a response. Bodies are not parsed."""
    buffer, responses = memoryview(bytearray(1 << 20)), 0
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as open_sockets:
        for _ in range(connections):
            client = open_sockets.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(request)
            selector.register(client, selectors.EVENT_READ, [0])
        started, before_s = time.monotonic(), cpu_s(server.pid)
        while (elapsed_s := time.monotonic() - started) < seconds or not responses:
            for key, _ in selector.select(1):
                client, left = key.fileobj, key.data
                assert isinstance(client, socket.socket)
                received = client.recv_into(buffer)
                left[0] = left[0] - received if left[0] else _bytes_to_come(bytes(buffer[:received]))
                if not left[0]:
                    responses += 1
                    client.sendall(request)
        return Measured(per_s=responses / elapsed_s, cpu_ms=(cpu_s(server.pid) - before_s) * 1000 / responses)


def _body_bytes(head: bytes) -> int:
    assert head.startswith(b"HTTP/1.1 200"), head[:500]
    return int(head.lower().partition(b"content-length: ")[2].split()[0])


def _bytes_to_come(received: bytes) -> int:
    head, _, body = received.partition(b"\r\n\r\n")
    return _body_bytes(head) - len(body)


def _first_bytes(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(request)
        return client.recv(65536)


def _request(characters: int) -> bytes:
    messages = [{"role": "user", "content": "x" * characters}]
    body = orjson.dumps({"messages": messages, "seed": 1, "logprobs": True, "return_token_ids": True})
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as directory:
        process = ChildProcess(command[1], command, directory=Path(directory), variables={})
        try:
            yield Server(pid=process.pid, port=listening_port(process))
        finally:
            process.kill()
