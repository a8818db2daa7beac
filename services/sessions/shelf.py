"""Where one server keeps its sessions in the store: a directory that no other server uses, found again after a restart.

Blocks: called in a thread, or before the loop runs.
"""

import fcntl
import os
import re
import socket
from pathlib import Path

from penstock.errors import ConfigError
from penstock.recording import unsealed
from penstock.store import Store

FOLDER = "sessions"


def owner_of(instance_id: str | None, port: int) -> str:
    """A server is known by the name it was given, else by where it listens: a client comes back to that."""
    return instance_id or re.sub(r"[^A-Za-z0-9_-]", "-", f"{socket.gethostname()}-{port}")[:100]


class Shelf:
    def __init__(self, store: Store, owner: str) -> None:
        self.store = store
        self.key = f"{FOLDER}/{owner}"
        self._lock: int | None = None

    def take(self) -> None:
        """For this process alone, until it ends."""
        path = self.store.path(self.key)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another session server uses {path}: choose another --port or --instance-id") from None
        except OSError as error:
            raise ConfigError(f"cannot keep sessions in {path}: {error.strerror}; choose another --store") from error

    def left_behind(self) -> list[str]:
        """Ids of the sessions that an earlier process did not seal; what it left of others goes."""
        found = {key.rpartition("/")[2] for key in unsealed(self.store, self.key)}
        for directory in self.store.path(self.key).iterdir():
            if directory.is_dir() and directory.name not in found:
                _tidy(directory)
        return sorted(found)

    def session_key(self, session: str) -> str:
        return f"{self.key}/{session}"

    def discard(self, session: str) -> None:
        """All files of a session, half-written blobs included; mostly they have gone already."""
        try:
            (self.store.root / self.session_key(session)).rmdir()
        except OSError:
            self.store.sweep(self.session_key(session), named=())


def _tidy(directory: Path) -> None:
    """Removes what was being written when its process was killed; sealed blobs are somebody's."""
    for file in directory.glob(".*"):
        file.unlink(missing_ok=True)
    if not any(directory.iterdir()):
        directory.rmdir()
