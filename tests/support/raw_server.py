"""A server that answers requests with any bytes, as a broken engine may."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from headpond.engines.http.transport import NAME_HEADER

Answer = Callable[[socket.socket, bytes, str], None]
"""Gets a connection, the body of a request and its name; sends what it likes."""


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
                body, name = read_request(requests.readline, requests.read)
                self.answer(connection, body, name)
        connection.close()


def read_request(readline: Callable[[], bytes], read: Callable[[int], bytes]) -> tuple[bytes, str]:
    headers: dict[bytes, bytes] = {}
    while (line := readline()).strip():
        header, _, value = line.partition(b":")
        headers[header.lower()] = value.strip()
    return read(int(headers.get(b"content-length", 0))), headers.get(NAME_HEADER.lower().encode(), b"").decode()


def http_response(body: bytes, *, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    return head + body


@contextmanager
def raw_server(answer: Answer) -> Iterator[RawServer]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = RawServer(listening=listening, answer=answer)
        threading.Thread(target=server.serve, daemon=True).start()
        yield server
        listening.shutdown(socket.SHUT_RDWR)
    for connection in server.connections:
        connection.close()
