"""Recording what the policy says: `Session` is the gate, the turns and their files until they are sealed as blobs."""

from penstock.recording.conversation import Mode
from penstock.recording.session import Claim, Prepared, Sealed, Session
from penstock.recording.spool import SessionSettings, unsealed

__all__ = ["Claim", "Mode", "Prepared", "Sealed", "Session", "SessionSettings", "unsealed"]
