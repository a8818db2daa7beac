"""Recording what the policy says: `Session` is the gate, the turns and their files until they are sealed as blobs."""

from penstock.recording.conversation import Digested, Mode, digested
from penstock.recording.session import Claim, Prepared, Sealed, Session
from penstock.recording.spool import SessionSettings, unsealed

__all__ = [
    "Claim",
    "Digested",
    "Mode",
    "Prepared",
    "Sealed",
    "Session",
    "SessionSettings",
    "digested",
    "unsealed",
]
