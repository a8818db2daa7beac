"""A server that answers requests with any bytes, as a broken engine may."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

Answer = Callable[[socket.socket, bytes], None]
"""Gets a connection and the body of a request; sends what it likes."""


@dataclass(kw_only=True)
class RawServer:
    listening: socket.socket
    answer: Answer
    connections: list[socket.socket] = field(default_factory=list[socket.socket])
    """in order of arrival"""
    targets: set[bytes] = field(default_factory=set[bytes])
    """method and target of every request"""

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.listening.getsockname())

    def serve(self) -> None:
        with suppress(OSError):  # closed by `raw_server`
            while True:
                connection, _ = self.listening.accept()
                self.connections.append(connection)
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with suppress(OSError), connection.makefile("rb") as requests:
            while line := requests.readline():
                self.targets.add(line.rpartition(b" ")[0])
                self.answer(connection, read_body(requests.readline, requests.read))
        connection.close()


def read_body(readline: Callable[[], bytes], read: Callable[[int], bytes]) -> bytes:
    length = 0
    while (line := readline()).strip():
        if line.lower().startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return read(length)


def http_response(body: bytes, *, status: bytes = b"200 OK", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b" % (
        status,
        len(body),
        headers,
        body,
    )


@contextmanager
def raw_server(answer: Answer) -> Iterator[RawServer]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = RawServer(listening=listening, answer=answer)
        threading.Thread(target=server.serve, daemon=True).start()
        yield server
        listening.shutdown(socket.SHUT_RDWR)
    for connection in server.connections:
        connection.close()
