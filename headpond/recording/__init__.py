"""Recording a rollout: a `Session` accepts turns, keeps them on disk, and is sealed into blobs of the store."""

from headpond.recording.arrivals import Claim
from headpond.recording.conversation import DigestedMessages, Mode, Prepared, digest_messages
from headpond.recording.echoes import Echo
from headpond.recording.session import Session
from headpond.recording.spool import SessionSettings, unsealed

__all__ = [
    "Claim",
    "DigestedMessages",
    "Echo",
    "Mode",
    "Prepared",
    "Session",
    "SessionSettings",
    "digest_messages",
    "unsealed",
]
