"""Recording a rollout: a `Session` accepts turns, keeps them on disk, and is sealed into blobs of the store."""

from penstock.recording.arrivals import Claim
from penstock.recording.conversation import DigestedMessages, Mode, Prepared, digest_messages
from penstock.recording.echoes import Echo
from penstock.recording.sample_columns import Sealed
from penstock.recording.session import Session
from penstock.recording.spool import SessionSettings, unsealed

__all__ = [
    "Claim",
    "DigestedMessages",
    "Echo",
    "Mode",
    "Prepared",
    "Sealed",
    "Session",
    "SessionSettings",
    "digest_messages",
    "unsealed",
]
