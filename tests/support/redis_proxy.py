"""Other ways to a Redis server that only has a TCP port: TLS with certificates made here, a unix socket, and a port
that looks at what is sent."""

import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HOST = "127.0.0.1"
Seen = Callable[[bytes], None]


class Authority:
    """A certificate authority and the certificate of a server at HOST."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.ca, self.certificate, self.key = (directory / name for name in ("ca.pem", "server.pem", "server.key"))
        ca_key, request, names = directory / "ca.key", directory / "request", directory / "names"
        # Python 3.13 refuses an authority without a key usage and a certificate that does not name its authority's key.
        names.write_text(f"subjectAltName=IP:{HOST}\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n")
        new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        _openssl(*new, "-x509", "-days", "2", "-subj", "/CN=authority", "-addext", "keyUsage=critical,keyCertSign",
                 "-keyout", ca_key, "-out", self.ca)  # fmt: skip
        _openssl(*new, "-subj", "/CN=server", "-keyout", self.key, "-out", request)
        _openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2",
                 "-extfile", names, "-out", self.certificate)  # fmt: skip


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, text=True)


@contextmanager
def tls_port(port: int, authority: Authority) -> Iterator[int]:
    """A port of HOST that speaks TLS and forwards to `port`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certificate, authority.key)
    with socket.create_server((HOST, 0)) as listening, _forwarding(listening, port, context):
        yield listening.getsockname()[1]


@contextmanager
def unix_socket(port: int, path: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        with _forwarding(listening, port, None):
            yield path


@contextmanager
def watched_port(port: int, seen: Seen) -> Iterator[int]:
    """A port of HOST that calls `seen` with what clients send, then forwards it to `port`."""
    with socket.create_server((HOST, 0)) as listening, _forwarding(listening, port, None, seen):
        yield listening.getsockname()[1]


@contextmanager
def _forwarding(
    listening: socket.socket, port: int, context: ssl.SSLContext | None, seen: Seen | None = None
) -> Iterator[None]:
    def accept() -> None:
        with suppress(OSError):  # the listening socket is closed
            while True:
                client, _ = listening.accept()
                threading.Thread(target=_serve, args=(client, port, context, seen), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        listening.shutdown(socket.SHUT_RDWR)


def _serve(client: socket.socket, port: int, context: ssl.SSLContext | None, seen: Seen | None) -> None:
    with suppress(OSError), client:
        inside = context.wrap_socket(client, server_side=True) if context else client
        with inside, socket.create_connection((HOST, port)) as server:
            back = threading.Thread(target=_copy, args=(server, inside), daemon=True)
            back.start()
            _copy(inside, server, seen)
            back.join()


def _copy(source: socket.socket, target: socket.socket, seen: Seen | None = None) -> None:
    with suppress(OSError, ValueError):
        while content := source.recv(1 << 16):
            if seen is not None:
                seen(content)
            target.sendall(content)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
