"""The socket on which a server of this machine listens, and its URL."""

import socket

from headpond.errors import ConfigError

# Clients that connect at once wait here: a group's agents may begin in the same moment.
BACKLOG = 1024


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 is any free one."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port (0: any)"
        ) from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
