"""The directory of one session server in the store, locked against other servers and reused after a restart.

Its methods block: call them in a thread, or before the loop runs.
"""

import contextlib
import fcntl
import os
import re
import socket
from pathlib import Path

from headpond import ids
from headpond.errors import ConfigError
from headpond.recording import unsealed
from headpond.store import Store, atomic

SEALED, SCORE, LOCK = ".sealed.json", ".score.json", ".lock"


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
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another session server uses {path}: choose another --port or --instance-id") from None
        except OSError as error:
            raise ConfigError(f"cannot keep sessions in {path}: {error.strerror}; choose another --store") from error

    def recoverable(self) -> list[str]:
        """Ids of the sessions that an earlier process did not seal, or sealed and did not delete. Removes its other
        unfinished files."""
        found = {key.rpartition("/")[2] for key in unsealed(self.store, self.key)}
        root = self.store.local_path(self.key)
        for directory in root.iterdir():
            if directory.is_dir() and directory.name not in found:
                _remove_unfinished(directory)
        return sorted(found | {path.parent.name for path in root.glob(f"*/{SEALED}")})

    def session_key(self, session: str) -> str:
        return f"{self.key}/{session}"

    def save_score(self, session: str, score: bytes) -> None:
        _write(self._path(session, SCORE), score)

    def score(self, session: str) -> bytes:
        path = self._path(session, SCORE)
        return path.read_bytes() if path.exists() else b"{}"

    def save_sealed(self, session: str, sealed: bytes) -> None:
        """Keep the response to a seal request until the session is deleted or expires."""
        _write(self._path(session, SEALED), sealed)

    def sealed(self, session: str) -> bytes | None:
        """Return the content that `save_sealed` wrote. None if the seal request did not finish: the session is then
        sealed again from its log."""
        path = self._path(session, SEALED)
        return path.read_bytes() if path.exists() and not unsealed(self.store, self.session_key(session)) else None

    def forget_sealed(self, session: str) -> None:
        """Sealed blobs stay."""
        path = self._path(session, SEALED)
        path.unlink(missing_ok=True)
        path.with_name(SCORE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it has blobs, or was never made
            path.parent.rmdir()

    def _path(self, session: str, name: str) -> Path:
        return self.store.local_path(self.session_key(session)) / name

    def discard(self, session: str) -> None:
        """Remove all files of a session, unfinished ones included. Usually only the empty directory is left."""
        self.store.sweep(self.session_key(session), named=())


def _write(path: Path, content: bytes) -> None:
    with atomic.writing(path):
        atomic.write(path, content)


def _remove_unfinished(directory: Path) -> None:
    """Sealed blobs stay: they belong to the client that sealed them, and so does the response to it."""
    for file in directory.glob(".*"):
        if file.name != SEALED:
            file.unlink(missing_ok=True)
    if not any(directory.iterdir()):
        directory.rmdir()
