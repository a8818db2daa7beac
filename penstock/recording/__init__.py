"""Recording a rollout: a `Session` accepts turns, keeps them on disk, and is sealed into blobs of the store."""

from penstock.recording.conversation import DigestedMessages, Mode, digest_messages
from penstock.recording.session import Claim, Prepared, Sealed, Session
from penstock.recording.spool import SessionSettings, unsealed

__all__ = [
    "Claim",
    "DigestedMessages",
    "Mode",
    "Prepared",
    "Sealed",
    "Session",
    "SessionSettings",
    "digest_messages",
    "unsealed",
]
