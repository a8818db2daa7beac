"""`python -m bench.harness.bare_forwarder ENGINE_PORT DIRECTORY`: the least that a recorder in this language does.

Receives the engine's response in one buffer, cuts the routed experts out of it, writes those that the connection's last
response did not have to a file, and forwards the rest. It knows no sessions and checks nothing: the session server is
measured against it.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import cast

from headpond.event_loop.factory import event_loop_factory

KEY, END, HEAD_END, LENGTH = b'"routed_experts":{"data":"', b'"', b"\r\n\r\n", b"content-length: "
FIRST_BYTES = 1 << 21
"""of the buffer; it grows with larger responses"""
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Upstream(asyncio.BufferedProtocol):
    """A connection to the engine, that of one client. Responses are received at the beginning of `_buffer`."""

    def __init__(self, client: asyncio.Transport, file: int) -> None:
        self._client, self._file = client, file
        self._buffer = bytearray(FIRST_BYTES)
        self._received = self._size = self._written = self._body_at = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        if not self._size and (end := self._buffer.find(HEAD_END, 0, self._received)) >= 0:
            self._body_at = end + len(HEAD_END)
            length = bytes(self._buffer[:end]).lower().partition(LENGTH)[2].split(None, 1)[0]
            self._size = self._body_at + int(length)
            if self._size > len(self._buffer):
                self._buffer = self._buffer[: self._received] + bytes(self._size - self._received)
        if self._received == self._size:
            self._forward()
            self._received = self._size = 0

    def _forward(self) -> None:
        body = memoryview(self._buffer)
        start = self._buffer.index(KEY, self._body_at, self._size) + len(KEY)
        end = self._buffer.index(END, start, self._size)
        known = self._written if end - start > self._written else 0  # a shorter one is of another conversation
        os.pwrite(self._file, body[start + known : end], known)
        self._written = end - start
        before, behind = bytes(body[self._body_at : start]), bytes(body[end : self._size])
        self._client.writelines([OK % (len(before) + len(behind)), before, behind])

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.close()


class Client(asyncio.Protocol):
    """Requests pass as they are. An agent sends the next one when it has its response."""

    def __init__(self, engine_port: int, directory: Path) -> None:
        self._engine_port, self._directory = engine_port, directory
        self._upstream: asyncio.Transport | None = None
        self._early = list[bytes]()
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._file = os.open(self._directory, os.O_TMPFILE | os.O_WRONLY)
        self._connecting = asyncio.create_task(self._connect(cast("asyncio.Transport", transport)))

    async def _connect(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        upstream, _ = await loop.create_connection(
            lambda: Upstream(transport, self._file), "127.0.0.1", self._engine_port
        )
        self._upstream = upstream
        self._upstream.writelines(self._early)

    def data_received(self, data: bytes) -> None:
        if self._upstream is None:
            self._early.append(data)
        else:
            self._upstream.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._upstream is not None:
            self._upstream.close()
        os.close(self._file)


async def serve(engine_port: int, directory: Path) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(engine_port, directory), "127.0.0.1", 0)
    print(f"url=http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)  # noqa: T201  read by the parent process
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
