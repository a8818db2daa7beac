"""Messages between a worker and the process of a `verifiers` environment, one line of JSON each."""

from enum import StrEnum
from typing import Any

import msgspec

HEARTBEAT_INTERVAL_S = 1.0
# A process without a heartbeat for this long is considered hung, usually in a reward that never
# returns.
HANG_TIMEOUT_S = 60.0
MAX_LINE_BYTES = 1 << 20
# Reasons are cut to this length: an engine's error may be a whole HTML page.
MAX_REASON_CHARACTERS = 4_000
# Time for the process to remove its sandboxes after its connection closes. The package allows 10
# s for each.
SHUTDOWN_TIMEOUT_S = 20.0


class Outcome(StrEnum):
    """How an episode ended. The failures are those of `headpond.errors`."""

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
    directory: str | None = None  # Directory for the files of episodes.


class EpisodeRequest(msgspec.Struct, frozen=True, kw_only=True, tag="episode_request"):
    number: int
    example: int
    base_url: str
    api_key: str
    model: str


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, tag="cancel_request"):
    """Cancels an episode. Its EpisodeResult follows when the episode has been cleaned up."""

    number: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    examples: int


class LoadFailure(msgspec.Struct, frozen=True, kw_only=True, tag="load_failure"):
    reason: str


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    pass


class EpisodeResult(msgspec.Struct, frozen=True, kw_only=True, tag="episode_result"):
    number: int
    outcome: Outcome
    reason: str = ""
    reward: float = 0.0
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}


settings_decoder = msgspec.json.Decoder(Settings)
worker_message_decoder = msgspec.json.Decoder(EpisodeRequest | CancelRequest)
child_message_decoder = msgspec.json.Decoder(Ready | LoadFailure | Heartbeat | EpisodeResult)


def encode_line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"
