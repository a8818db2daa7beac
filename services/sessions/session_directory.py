"""The directory of one session server in the store, locked against other servers and reused after a restart.

Its methods block: call them in a thread, or before the loop runs.
"""

import fcntl
import os
import re
import socket
from pathlib import Path

from penstock import ids
from penstock.errors import ConfigError
from penstock.recording import unsealed
from penstock.store import Store


def owner_of(instance_id: str | None, port: int) -> str:
    """The directory's name: the instance id, else host and port, by which clients find the server again."""
    return instance_id or re.sub(r"[^A-Za-z0-9_-]", "-", f"{socket.gethostname()}-{port}")[:100]


class SessionDirectory:
    def __init__(self, store: Store, owner: str) -> None:
        self.store = store
        self.key = f"{ids.SESSIONS_FOLDER}/{owner}"
        self._lock: int | None = None

    def lock(self) -> None:
        """Held until the process ends."""
        self.store.keep_spool(self.key.replace("/", "-"))
        path = self.store.local_path(self.key)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another session server uses {path}: choose another --port or --instance-id") from None
        except OSError as error:
            raise ConfigError(f"cannot keep sessions in {path}: {error.strerror}; choose another --store") from error

    def recoverable(self) -> list[str]:
        """Ids of the sessions that an earlier process did not seal. Removes its other unfinished files."""
        found = {key.rpartition("/")[2] for key in unsealed(self.store, self.key)}
        for directory in self.store.local_path(self.key).iterdir():
            if directory.is_dir() and directory.name not in found:
                _remove_unfinished(directory)
        return sorted(found)

    def session_key(self, session: str) -> str:
        return f"{self.key}/{session}"

    def discard(self, session: str) -> None:
        """Remove all files of a session, unfinished ones included. Usually only the empty directory is left."""
        self.store.sweep(self.session_key(session), named=())


def _remove_unfinished(directory: Path) -> None:
    """Sealed blobs stay: they belong to the client that sealed them."""
    for file in directory.glob(".*"):
        file.unlink(missing_ok=True)
    if not any(directory.iterdir()):
        directory.rmdir()
