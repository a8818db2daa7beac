"""Ports for servers that are told where to listen."""

import random
import socket

PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to connections and to servers that ask for any: nothing takes one meanwhile."""


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of as many ports in a row that are free now."""
    while True:
        port = random.choice(PORTS)
        try:
            for each in range(port, port + count):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return port
