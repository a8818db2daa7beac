"""up.json in the run directory: which processes of `headpond up` have ended, told to `headpond why`."""

from pathlib import Path

import msgspec

from headpond.inspection.run_state import is_locked
from headpond.store import atomic

NAME, LOCK = "up.json", "up.lock"


class EndedProcess(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ended: str  # how, e.g. `ended with exit code 1`
    starts: int  # how often it was started again
    returns: bool  # whether it is started again, or is running again
    reason: str  # a line of its output
    log: str

    @property
    def sentence(self) -> str:
        times = f", {self.starts:,} times so far" if self.starts > 1 else ""
        then = f"it is started again{times}" if self.returns else "`headpond up` does not start it again"
        return f"the {self.name} {self.ended}; {then}. {self.log} says: {self.reason}"


def write(run_dir: Path, ended: list[EndedProcess]) -> None:
    """Raises OSError."""
    atomic.write(run_dir / NAME, msgspec.json.encode(ended))


def read(run_dir: Path) -> list[EndedProcess]:
    """Empty if no `headpond up` runs on this host."""
    if not is_locked(run_dir / LOCK, if_unreadable=False):
        return []
    try:
        return msgspec.json.decode((run_dir / NAME).read_bytes(), type=list[EndedProcess])
    except (OSError, msgspec.DecodeError):
        return []
