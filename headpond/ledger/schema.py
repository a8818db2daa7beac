"""The ledger's tables, how a ledger is opened, and on which file systems it may be."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from headpond.errors import LedgerError
from headpond.ledger import archive

SCHEMA_VERSION = 3
# The rollouts and jobs of open groups, and of closed ones until they are archived.
HOT_TABLES = """
CREATE TABLE rollouts (
    grp TEXT, idx INTEGER, state TEXT NOT NULL, reason TEXT, step INTEGER, advantage REAL, result TEXT,
    masked INTEGER NOT NULL, error TEXT, attempt INTEGER, execution, generated_at REAL, duration_s REAL,
    PRIMARY KEY (grp, idx)
) WITHOUT ROWID;
CREATE TABLE groups (
    id TEXT PRIMARY KEY, ordinal INTEGER NOT NULL, environment TEXT NOT NULL, example INTEGER NOT NULL,
    state TEXT NOT NULL, purpose TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, subject TEXT NOT NULL, attempt INTEGER NOT NULL,
    sequence INTEGER NOT NULL, state TEXT NOT NULL, failures INTEGER NOT NULL, losses INTEGER NOT NULL,
    error TEXT, result TEXT
) WITHOUT ROWID;
CREATE INDEX open_groups ON groups (ordinal) WHERE state != 'closed';
CREATE INDEX unarchived_groups ON groups (ordinal) WHERE state = 'closed';
CREATE INDEX open_jobs ON jobs (sequence) WHERE state IN ('waiting', 'submitted');
"""
# `state`: the rows of headpond/ledger/state_rows.py. As JSON, so that a new attribute needs no new schema. The rowid
# keeps the order of writing. They have every count of rollouts and of dead jobs: no start counts rows.
TABLES = f"""
CREATE TABLE state (
    kind TEXT, name TEXT, number INTEGER, content TEXT NOT NULL, PRIMARY KEY (kind, name, number)
);
{HOT_TABLES}
CREATE TABLE batches (
    step INTEGER PRIMARY KEY, formation INTEGER NOT NULL, state TEXT NOT NULL, rollouts INTEGER NOT NULL,
    advantages TEXT, estimator_state TEXT, credit TEXT
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, step INTEGER NOT NULL, subject TEXT NOT NULL, action TEXT NOT NULL,
    detail TEXT NOT NULL
);
CREATE INDEX events_by_subject ON events (subject);
{archive.TABLES}
{archive.VIEWS}
"""
# FULL: a commit is on disk before anything that depends on it leaves the process.
WRITABLE = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
PRAGMA temp_store = MEMORY;
{archive.CLOSING};
"""
CREATE = f"BEGIN; {TABLES} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
# In this order in each transaction: a step may be dissolved and composed again between two commits.
STATEMENTS = {
    "rollouts": "INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "groups": "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?)",
    "jobs": "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "batches": "INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?, ?, ?)",
    "state": "INSERT OR REPLACE INTO state VALUES (?, ?, ?, ?)",
    "forgotten_state": "DELETE FROM state WHERE kind = ? AND name = ? AND number = ?",
    "forgotten_jobs": "DELETE FROM jobs WHERE id = ?",
    "dissolved": "UPDATE rollouts SET state = 'admitted', step = NULL WHERE grp = ? AND state = 'batched'",
    "batched": "UPDATE rollouts SET state = 'batched', step = ? WHERE grp = ? AND state = 'admitted'",
    "delivered": "UPDATE rollouts SET state = 'delivered' WHERE grp = ? AND state = 'batched'",
    "advantages": "UPDATE rollouts SET advantage = ? WHERE grp = ? AND idx = ?",
    "trained": "UPDATE batches SET state = 'trained' WHERE step = ?",
    "events": "INSERT INTO events (at, step, subject, action, detail) VALUES (?, ?, ?, ?, ?)",
}
# SQLite's locks and shared memory do not hold across hosts, and several of these lose writes silently.
NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs", "gfs2", "gpfs"}
    | {"glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs", "virtiofs", "wekafs"}
)


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Create missing tables. For the writer thread only."""
    with _opened(path, str(path)) as connection:
        is_new = not version_of(connection)
        if is_new and connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise sqlite3.DatabaseError("it has tables, but no version of the schema")
        connection.executescript(WRITABLE)
        if is_new:
            connection.executescript(CREATE)
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Creates no file: a ledger without a write-ahead log is closed, so it is opened as immutable."""
    if not path.exists():
        raise LedgerError(f"there is no ledger at {path}: is this a run directory?")
    mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    with _opened(path, f"file:{quote(str(path))}?{mode}") as connection:
        return connection


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    with explained(path), closing(open_for_reading(path)) as connection:
        yield connection


@contextmanager
def _opened(path: Path, name: str) -> Iterator[sqlite3.Connection]:
    """A connection that the body prepares; it is closed only after an error. Other versions are refused."""
    with explained(path), ExitStack() as on_error:
        connection = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
        on_error.callback(connection.close)
        version = version_of(connection)
        if version not in (0, SCHEMA_VERSION):
            raise LedgerError(
                f"the ledger {path} was written by another version of Headpond (schema {version}, not "
                f"{SCHEMA_VERSION}): use the version that started the run, or another run_dir"
            )
        yield connection
        on_error.pop_all()


def version_of(connection: sqlite3.Connection) -> int:
    """0 if the tables have not been created yet."""
    return connection.execute("PRAGMA user_version").fetchone()[0]


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors of SQLite into a LedgerError that names what to check."""
    try:
        yield
    except sqlite3.Error as error:
        raise LedgerError(
            f"the ledger {path} cannot be used ({error}): check that the file is a ledger, that its permissions allow "
            "reading and writing and that its disk is not full, or restore it; nothing was changed"
        ) from error


def refuse_network_file_system(directory: Path, mounts: str | None = None) -> None:
    """`mounts` is the text of /proc/self/mountinfo."""
    if mounts is None:
        table = Path("/proc/self/mountinfo")
        mounts = table.read_text() if table.exists() else ""
    kind = file_system(directory, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise LedgerError(
            f"the ledger cannot be on a network file system: {directory} is {kind}. "
            'Set ledger_dir to a directory on a local disk, e.g. ledger_dir = "/var/lib/headpond"; '
            "batches and blobs may stay where they are."
        )


def file_system(directory: Path, mounts: str) -> str | None:
    """Type of the mount that holds `directory`: of its parents, the longest mount point, the last one mounted there."""
    held_by: tuple[int, str | None] = (-1, None)
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        mount_point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4])
        if directory.is_relative_to(mount_point) and len(mount_point) >= held_by[0]:
            held_by = (len(mount_point), right.split()[0])
    return held_by[1]
