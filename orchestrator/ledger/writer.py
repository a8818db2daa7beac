"""The writer thread of the ledger: it commits all queued changes as one transaction.

Every commit also archives a few closed groups and deletes a few old histories, so that no commit becomes long. When
nothing is queued, the rest is archived in commits of its own.

A commit that fails (disk full, I/O error) is retried until it succeeds. The orchestrator waits for its commits, so
nothing proceeds that is not written. Any other error is final: it is passed to every later caller.
"""

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

from headpond.errors import LedgerError
from headpond.ledger.archive import archive, has_closing, prune
from headpond.ledger.schema import STATEMENTS, open_for_writing
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.ledger.rows import Row

logger = logging.getLogger("headpond.ledger")

Changes = dict[str, list[Row]]
# Called on the writer thread: with None when the changes are on disk, else with the error that
# keeps them off it.
Committed = Callable[[Exception | None], object]
RETRY_S = 1.0
KEEP_EVENTS_STEPS = 50
# About 20 MB of events, and 200 MB of histories of groups of 8.
KEPT_ROWS = {"events": 100_000, "histories": 50_000}
ARCHIVED_AT_ONCE = 16  # groups in a commit: 128 rollouts take about 3 ms of this thread, mostly without the GIL
PRUNE_EVERY = 16  # commits
PRUNED_AT_ONCE = 2 * PRUNE_EVERY * ARCHIVED_AT_ONCE  # rows: more than commits add
IDLE_S = 0.02  # between two commits that only archive
ARCHIVED_AT_CLOSE = 256  # commits: the next start archives the rest


class Writer:
    def __init__(
        self, path: Path, *, keep_events_steps: int = KEEP_EVENTS_STEPS, troubles: Troubles | None = None
    ) -> None:
        self.path = path
        self._keep_events_steps = keep_events_steps
        self.trouble = (troubles or Troubles()).entry()  # why commits fail at present
        self.commits = 0
        self._connection = open_for_writing(path)
        # there may be closed groups in the hot tables
        self._unarchived = has_closing(self._connection)
        self._queue: queue.SimpleQueue[tuple[Changes, Committed] | None] = queue.SimpleQueue()
        self._failed: Exception | None = None
        self._abandon = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="headpond-ledger", daemon=True)
        self._thread.start()

    def commit(self, changes: Changes) -> asyncio.Future[None]:
        """Done when the changes are on disk. Call on an event loop."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self.put(changes, lambda error: _tell(loop, done, error))
        return done

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
            gathered = self._gather()
            closing = None in gathered
            work = [item for item in gathered if item is not None]
            if (work or (self._unarchived and not closing)) and self._commit_until_done(
                [changes for changes, _ in work]
            ):
                for _, committed in work:
                    committed(self._failed)
        for _ in range(ARCHIVED_AT_CLOSE if self.trouble.text is None else 0):
            if not self._unarchived or not self._commit_until_done([]) or self._failed:
                break

    def _gather(self) -> list[tuple[Changes, Committed] | None]:
        """Everything that is queued; waits for it unless there is something to archive."""
        try:
            gathered = [self._queue.get(timeout=IDLE_S if self._unarchived and not self._failed else None)]
        except queue.Empty:
            return []
        while not self._queue.empty():
            gathered.append(self._queue.get())
        return gathered

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
                if self.trouble.text:
                    logger.info("action=ledger_writes_again")
                self.trouble.text = None
                return True
        return self._failed is not None

    def _commit(self, gathered: list[Changes]) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for changes in gathered:
                for table, rows in changes.items():
                    connection.executemany(STATEMENTS[table], rows)
            archived = archive(connection, at_most=ARCHIVED_AT_ONCE, now=time.time())
            if self.commits % PRUNE_EVERY == 0:
                steps = self._keep_events_steps
                for table, rows in KEPT_ROWS.items():
                    prune(connection, table, rows=rows, steps=steps, at_most=PRUNED_AT_ONCE)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._unarchived = archived == ARCHIVED_AT_ONCE
        self.commits += 1

    def _report(self, error: sqlite3.Error) -> None:
        if self.trouble.text is None:
            logger.error(
                "action=ledger_waits path=%s error=%s; the run waits until the ledger can be written", self.path, error
            )
        self.trouble.text = (
            f"the ledger {self.path} cannot be written ({error}): free space on its disk; nothing is lost"
        )


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None], error: Exception | None) -> None:
    """On the writer thread, which must survive a loop that did not wait for its last commit."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, done, error)


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(LedgerError(f"the ledger cannot be written ({error}): this is a bug; nothing was delivered"))
