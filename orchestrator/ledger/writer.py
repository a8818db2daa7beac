"""The writer thread of the ledger: it commits all queued changes as one transaction.

A commit that fails (disk full, I/O error) is retried until it succeeds. The orchestrator waits for its commits, so
nothing proceeds that is not written. Any other error is final: it is passed to every later caller.
"""

import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from orchestrator.ledger.records import Row
from penstock.ledger.schema import STATEMENTS, open_for_writing

logger = logging.getLogger("penstock.ledger")

Changes = dict[str, list[Row]]
Committed = Callable[[Exception | None], object]
"""Called on the writer thread: with None when the changes are on disk, else with the error that keeps them off it."""
RETRY_S = 1.0
EVENTS_KEPT = 100_000  # about 20 MB; older ones are deleted
PRUNE_EVERY = 1_000


class Writer:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: str | None = None
        """why commits fail at present"""
        self.commits = 0
        self._connection = open_for_writing(path)
        self._queue: queue.SimpleQueue[tuple[Changes, Committed] | None] = queue.SimpleQueue()
        self._failed: Exception | None = None
        self._abandon = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="penstock-ledger", daemon=True)
        self._thread.start()

    def put(self, changes: Changes, committed: Committed) -> None:
        self._queue.put((changes, committed))

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Commit what is queued; give up after `timeout_s` if commits fail."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._abandon.set()
        self._thread.join(2 * RETRY_S)
        if not self._thread.is_alive():
            self._connection.close()

    def _write_until_closed(self) -> None:
        closing = False
        while not closing:
            gathered = [self._queue.get()]
            while not self._queue.empty():
                gathered.append(self._queue.get())
            closing = None in gathered
            work = [item for item in gathered if item is not None]
            if work and self._commit_until_done([changes for changes, _ in work]):
                for _, committed in work:
                    committed(self._failed)

    def _commit_until_done(self, gathered: list[Changes]) -> bool:
        """False if it was abandoned."""
        while not self._abandon.is_set() and self._failed is None:
            try:
                self._commit(gathered)
            except (sqlite3.ProgrammingError, sqlite3.InterfaceError) as error:
                self._failed = error
            except sqlite3.Error as error:
                self._report(error)
                self._abandon.wait(RETRY_S)
            except Exception as error:  # noqa: BLE001  a bug: if the thread ended, callers would wait for ever
                self._failed = error
            else:
                if self.trouble:
                    logger.info("action=ledger_writes_again")
                self.trouble = None
                return True
        return self._failed is not None

    def _commit(self, gathered: list[Changes]) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for changes in gathered:
                for table, rows in changes.items():
                    connection.executemany(STATEMENTS[table], rows)
            if self.commits % PRUNE_EVERY == 0:
                connection.execute("DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", (EVENTS_KEPT,))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.commits += 1

    def _report(self, error: sqlite3.Error) -> None:
        if self.trouble is None:
            logger.error(
                "action=ledger_waits path=%s error=%s; the run waits until the ledger can be written", self.path, error
            )
        self.trouble = f"the ledger {self.path} cannot be written ({error}): free space on its disk; nothing is lost"
