"""A store of one's own: every blob is a row of one SQLite file, shared by the processes of one host.

    store = "sqlite_store:SqliteStore:///path/to/run.sqlite"

Every process of the run finds this module on its PYTHONPATH. Small blobs only: SQLite copies each one whole.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from urllib.parse import unquote

from headpond.errors import BlobUnwritten
from headpond.store import Store

TABLE = "CREATE TABLE IF NOT EXISTS blobs (key TEXT PRIMARY KEY, content BLOB NOT NULL) WITHOUT ROWID"
PATIENCE_S = 60.0  # for the locks of other processes


class SqliteStore(Store):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._file = unquote(self.address)
        self._of_thread = threading.local()  # a connection is used by one thread only

    def write(self, key: str, content: bytes | memoryview) -> None:
        self._change("INSERT OR REPLACE INTO blobs VALUES (?, ?)", key, content)

    def create(self, key: str, content: bytes) -> bool:
        return self._change("INSERT OR IGNORE INTO blobs VALUES (?, ?)", key, content) == 1

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        length = -1 if stop is None else stop - start
        query = (
            "SELECT substr(content, :start + 1, iif(:length < 0, length(content), :length)) FROM blobs WHERE key = :key"
        )
        found = self._connection().execute(query, {"start": start, "length": length, "key": key}).fetchone()
        if found is None:
            raise self.missing(key)
        return found[0]

    def size(self, key: str) -> int | None:
        found = self._connection().execute("SELECT length(content) FROM blobs WHERE key = ?", (key,)).fetchone()
        return found and found[0]

    def keys(self, under: str) -> Iterator[str]:
        between = (f"{under}/", f"{under}0")  # "0" is the character after "/"
        yield from (
            key
            for (key,) in self._connection()
            .execute("SELECT key FROM blobs WHERE key > ? AND key < ?", between)
            .fetchall()
        )

    def delete(self, key: str) -> None:
        self._change("DELETE FROM blobs WHERE key = ?", key)

    def _change(self, statement: str, *values: object) -> int:
        try:
            with self._connection() as connection:
                return connection.execute(statement, values).rowcount
        except sqlite3.OperationalError as error:
            raise BlobUnwritten(f"cannot write {self._file}: {error}; check free space and permissions") from error

    def _connection(self) -> sqlite3.Connection:
        connection = getattr(self._of_thread, "connection", None)
        if connection is None:
            connection = self._of_thread.connection = sqlite3.connect(self._file, timeout=PATIENCE_S)
            self._use_write_ahead_log(connection)
            connection.execute("PRAGMA synchronous = FULL")
            with connection:
                connection.execute(TABLE)
        return connection

    def _use_write_ahead_log(self, connection: sqlite3.Connection) -> None:
        """SQLite does not wait here for another process that creates the file at the same time."""
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.01)
