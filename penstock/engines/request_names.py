"""Names of requests, by which a response is known to answer its own request.

vLLM repeats the header `X-Request-Id` in the `id` of its response, SGLang the field `rid` of the request. On a
connection that is used again, nothing else tells a response from bytes that the server sent before the request came.
"""

import logging
import secrets
from collections.abc import Sequence
from itertools import count

from penstock.engines.replicas import Replica
from penstock.errors import Upstream
from penstock.turn import Body

logger = logging.getLogger("penstock.engines")

NAME_HEADER = "X-Request-Id"
HEAD_BYTES = 512
"""Of a response, in which its name is looked for: both servers begin with it."""


class RequestNames:
    """One per process and engine."""

    def __init__(self) -> None:
        self._prefix = f"penstock-{secrets.token_hex(8)}-"
        self._numbers = count(1)

    def next(self) -> str:
        return f"{self._prefix}{next(self._numbers):012x}"

    def check(self, replica: Replica, name: str, head: bytes) -> None:
        """`Upstream` if a response with this `head` answers another request than `name`. A replica that named its last
        request must name this one; until it does, its connections are used once each (`IdleConnector`)."""
        if name.encode() in head:
            replica.names_requests = True
            return
        if replica.names_requests or self._prefix.encode() in head:
            replica.names_requests = False
            logger.warning("action=response_refused engine=%s: it does not name the request %s", replica.url, name)
            raise Upstream("the engine's response does not name its request: it answers another one")


def head_of(chunks: Sequence[Body]) -> bytes:
    head = b""
    for chunk in chunks:
        head += chunk[:HEAD_BYTES]
        if len(head) >= HEAD_BYTES:
            break
    return head[:HEAD_BYTES]
