"""What a worker and the process of a `verifiers` environment say to each other: a line of JSON each."""

from enum import StrEnum
from typing import Any

import msgspec

BEAT_S = 1.0
"""So often the process says that its loop turns."""
SILENCE_S = 60.0
"""A loop that has not turned for so long hangs: in a reward that never returns, most often."""

LINE_BYTES = 1 << 20
WHY_CHARACTERS = 4_000
"""Of a message, the first: an engine may have answered with a whole page."""
END_S = 20.0
"""What the process has to put its sandboxes away, once its line has ended: the package gives each 10 s."""


class Kind(StrEnum):
    """How an episode ended, in the words of `penstock.errors`."""

    SCORED = "scored"
    POLICY = "policy"
    INFRASTRUCTURE = "infrastructure"
    UNREACHABLE = "unreachable"
    ENVIRONMENT = "environment"
    CANCELLED = "cancelled"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    taskset: str
    harness: str | None
    size: int | None
    config: dict[str, Any]
    directory: str | None = None
    """for what episodes put on this machine's disk"""


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    number: int
    example: int
    base_url: str
    api_key: str
    model: str


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Is answered like everything else that was asked, when nothing is left of it."""

    number: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    examples: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    why: str


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    pass


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    number: int
    kind: Kind
    why: str = ""
    reward: float = 0.0
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}


SETTINGS = msgspec.json.Decoder(Settings)
ASKED = msgspec.json.Decoder(Ask | Cancel)
SAID = msgspec.json.Decoder(Ready | Refused | Beat | Answer)


def line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"
