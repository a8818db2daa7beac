"""Free ports of this machine, below the range that outgoing connections use."""

import contextlib
import socket

from penstock.errors import RunError
from penstock.runtime.embedded_redis import HOST, PORT_TRIES, PORTS, system_random


def free_port() -> int:
    for port in system_random.sample(PORTS, PORT_TRIES):
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port
    raise RunError(f"found no free port on {HOST}: {PORT_TRIES} random ones between {PORTS[0]} and {PORTS[-1]} failed")
