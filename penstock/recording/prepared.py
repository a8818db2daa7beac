"""A request that is ready to be sent: what it continues, and what is needed to read its response."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.recording.conversation import START, ConversationRequest, DigestedMessages
from penstock.turn import Ids, OpenSample, RouteFormat

NO_ARRIVAL = -1
"""Of a request that is not recorded."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is needed to send a request and to read its response."""

    request: ConversationRequest
    arrival: int
    """Number of the request in the session, from 0 on."""
    history_ids: Ids
    """Tokens of the conversation before `request.appended`."""
    answer_from: int
    """Position of the last answer in `history_ids`."""
    routes_from: int
    """First routed row to request, provided that the prompt begins with `history_ids`."""
    open_turns: Mapping[int, OpenSample]
    """Turns that the response may extend."""
    route_format: RouteFormat
    """For `read_turn`."""

    @property
    def open_samples(self) -> list[OpenSample]:
        """For `read_turn`."""
        return list(self.open_turns.values())

    @classmethod
    def unrecorded(cls, messages: DigestedMessages, route_format: RouteFormat) -> "Prepared":
        """A request that is no part of the conversation."""
        return cls(
            request=ConversationRequest(parent=START, appended=messages.messages, forms=messages.forms),
            arrival=NO_ARRIVAL,
            history_ids=np.empty(0, np.int32),
            answer_from=0,
            routes_from=0,
            open_turns={},
            route_format=route_format,
        )
