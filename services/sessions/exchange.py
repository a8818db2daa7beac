"""From an engine's bytes to what is recorded of them and what the client gets: pure, for whichever thread has room."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engines.dialects import Endpoint
from penstock.engines.response import without_routes
from penstock.turn import Turn
from services.sessions.backend import Answered
from services.sessions.event_stream import as_event_stream


@dataclass(frozen=True, kw_only=True)
class Answer:
    turn: Turn
    body: bytes
    """what the client gets"""
    record: bytes
    """the exchange as JSON"""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What an answer is read with."""

    request: bytes
    """as it was sent to the engine"""
    read: Callable[[bytes], Turn]
    stream: bool
    logprobs: bool
    """whether a streaming client asked for them"""

    def answer(self, answered: Answered) -> Answer:
        whole = answered.joined()
        turn = self.read(whole)
        body = without_routes(whole, turn)
        return Answer(
            turn=turn,
            body=as_event_stream(body, logprobs=self.logprobs) if self.stream else body,
            record=record(self.request, body),
        )


def record(request: bytes, response: bytes) -> bytes:
    """Both are valid JSON already: nothing is parsed."""
    return b'{"timestamp":%.6f,"method":"POST","path":"%b","status_code":200,"request":%b,"response":%b}' % (
        time.time(),
        Endpoint.CHAT.encode(),
        request,
        response,
    )
