"""Turns the ledger of an earlier release (schema 1) into one of this release.

A new file is filled beside the old one and replaces it by a rename: until then the old one is whole, and an upgrade
that was killed begins again. Call under the lock of the run directory.
"""

import logging
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from headpond.errors import LedgerError
from headpond.ids import execution_of
from headpond.ledger import queries
from headpond.ledger.archive import ARCHIVE_HISTORIES, DELIVERED, copy_closing, execution_code
from headpond.ledger.schema import OLD_AS_NEW, OLD_VERSION, STATEMENTS, explained, open_for_writing, version_of
from headpond.orchestrator.ledger.counts import CAUSES_MOST
from headpond.store import atomic

logger = logging.getLogger("headpond.ledger")

AT_ONCE = 1_000  # groups: a tenth of a second
REPORTED_EVERY_S = 2.0
# The new file is thrown away if the process ends before it is complete.
FILLING = "PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF; PRAGMA cache_size = -65536;"
KEY = "coalesce(json_extract(result, '$.columns.key'), json_extract(result, '$.experts.key'))"
SELECT_CLOSED = """
INSERT INTO temp.closing SELECT id, ordinal FROM old.groups WHERE state = 'closed' AND id > ? ORDER BY id LIMIT ?"""
SELECT_LATEST = """
INSERT INTO temp.closing SELECT printf('g%07d', ordinal), ordinal FROM main.closed_groups
WHERE step >= (SELECT value FROM old.meta WHERE key = 'steps_delivered') - ?"""
OPEN = "SELECT id FROM old.groups WHERE state != 'closed'"
COPY = f"""
INSERT INTO main.meta SELECT * FROM old.meta;
INSERT INTO main.groups SELECT * FROM old.groups WHERE state != 'closed';
INSERT INTO main.rollouts SELECT * FROM temp.rollouts WHERE grp IN ({OPEN});
INSERT INTO main.jobs
    SELECT * FROM old.jobs WHERE state IN ('waiting', 'submitted')
    UNION SELECT * FROM old.jobs WHERE id > 's' AND id < 't' AND state IN ('settled', 'dead')
        AND subject IN (SELECT CAST(step AS TEXT) FROM old.batches WHERE state = 'composed')
    UNION SELECT jobs.* FROM ({OPEN}) AS opened CROSS JOIN old.jobs AS jobs
        ON jobs.id > opened.id || '-' AND jobs.id < opened.id || '.';
INSERT INTO main.batches
    SELECT step, formation, batches.state, coalesce(number, 0) FROM old.batches AS batches
    LEFT JOIN (SELECT step, count(*) AS number FROM main.closed_groups JOIN main.closed_rollouts ON grp = ordinal
        WHERE closed_rollouts.state = {DELIVERED} GROUP BY step) USING (step);
INSERT INTO main.events SELECT id, at,
    coalesce((SELECT value FROM old.meta WHERE key = 'steps_delivered'), 0), subject, action, detail FROM old.events;
DROP VIEW temp.rollouts; DROP VIEW temp.groups; DROP VIEW temp.jobs;
"""
DEAD_JOBS = """
INSERT INTO counts SELECT ? || kind, coalesce(error, ''), count(*) FROM old.jobs WHERE state = 'dead'
GROUP BY kind, error ORDER BY 3 DESC LIMIT ?"""


def upgrade_ledger(path: Path, *, keep_events_steps: int) -> None:
    """Does nothing unless there is a ledger of the old version at `path`."""
    if not path.exists() or _prepared(path) != OLD_VERSION:
        return
    began = time.monotonic()
    with explained(path), atomic.replacing(path, suffix="upgrading") as new:
        with closing(open_for_writing(new)) as connection:
            connection.executescript(FILLING)
            groups = _fill(connection, path, keep_events_steps)
        _sync(new)
    atomic.sync_directory(path.parent)
    logger.info("action=ledger_upgraded path=%s groups=%d seconds=%.1f", path, groups, time.monotonic() - began)


def _prepared(path: Path) -> int:
    """The version of the ledger. An old one is made a single file, so that a rename replaces all of it."""
    with explained(path), closing(sqlite3.connect(path, isolation_level=None)) as connection:
        version = version_of(connection)
        if version == OLD_VERSION:
            try:
                connection.execute("PRAGMA journal_mode = DELETE")
            except sqlite3.OperationalError as error:
                raise LedgerError(
                    f"the ledger {path} is of an earlier release and cannot be upgraded ({error}): end other processes "
                    "that read it, check its disk, and run the same command again; nothing was changed"
                ) from error
    return version


def _fill(connection: sqlite3.Connection, old: Path, keep_events_steps: int) -> int:
    """Copy everything from the ledger `old`; returns the number of archived groups."""
    connection.create_function("attempt_of", 1, _attempt_of, deterministic=True)
    connection.create_function("execution_of", 1, _execution_of, deterministic=True)
    connection.execute("ATTACH ? AS old", (f"file:{quote(str(old))}?mode=ro",))
    connection.executescript(
        OLD_AS_NEW.format(old="old", attempt=f"attempt_of({KEY})", execution=f"execution_of({KEY})")
    )
    groups = _archive(connection)
    connection.execute(SELECT_LATEST, (keep_events_steps,))
    delivered = connection.execute("SELECT value FROM old.meta WHERE key = 'steps_delivered'").fetchone()
    connection.execute(ARCHIVE_HISTORIES, {"step": delivered[0] if delivered else 0})
    connection.executescript(COPY)
    connection.execute(DEAD_JOBS, (queries.DIED, CAUSES_MOST))
    for kind, counts in zip(("state", "reason"), queries.counted(connection), strict=True):
        connection.executemany(STATEMENTS["counts"], [(kind, name, number) for name, number in counts.items()])
    return groups


def _archive(connection: sqlite3.Connection) -> int:
    """Closed groups go to the archive, in the order of their ids."""
    total: int = connection.execute("SELECT count(*) FROM old.groups WHERE state = 'closed'").fetchone()[0]
    done, last, reported_at = 0, "", time.monotonic()
    while moved := connection.execute(SELECT_CLOSED, (last, AT_ONCE)).rowcount:
        copy_closing(connection, closed_at=None, step=None)
        last = connection.execute("SELECT max(id) FROM temp.closing").fetchone()[0]
        connection.execute("DELETE FROM temp.closing")
        done += moved
        if time.monotonic() - reported_at > REPORTED_EVERY_S:
            reported_at = time.monotonic()
            logger.info("action=ledger_upgrading groups=%d of=%d", done, total)
    return done


def _attempt_of(key: str | None) -> int | None:
    named = execution_of(key) if key else None
    return named[0] if named else None


def _execution_of(key: str | None) -> int | str | None:
    named = execution_of(key) if key else None
    return execution_code(named[1]) if named else None


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
