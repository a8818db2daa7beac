"""Free ports of this machine, below the range that outgoing connections use."""

import contextlib
import socket
from pathlib import Path

from headpond.errors import RunError
from headpond.processes.embedded_redis import HOST, PORT_TRIES, PORTS, system_random


def kept_port(path: Path) -> int:
    """The port of the last start, which the file names, if it is free: a browser's open tab goes on. Else another one,
    which the file then names."""
    with contextlib.suppress(OSError, ValueError):
        port = int(path.read_text())
        if port in PORTS:
            with socket.create_server((HOST, port)):
                return port
    port = free_port()
    with contextlib.suppress(OSError):  # the next start takes another one
        path.write_text(f"{port}\n")
    return port


def free_port() -> int:
    for port in system_random.sample(PORTS, PORT_TRIES):
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port
    raise RunError(f"found no free port on {HOST}: {PORT_TRIES} random ones between {PORTS[0]} and {PORTS[-1]} failed")
