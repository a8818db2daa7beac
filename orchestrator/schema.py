"""The ledger's tables, opening them, and where they may lie."""

import sqlite3
from pathlib import Path

from penstock.errors import LedgerError

SCHEMA_VERSION = 1
TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rollouts (
    grp TEXT, idx INTEGER, state TEXT NOT NULL, reason TEXT, step INTEGER, advantage REAL, result TEXT,
    masked INTEGER NOT NULL, error TEXT,
    PRIMARY KEY (grp, idx)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    id TEXT PRIMARY KEY, ordinal INTEGER NOT NULL, environment TEXT NOT NULL, example INTEGER NOT NULL,
    state TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, subject TEXT NOT NULL, attempt INTEGER NOT NULL,
    sequence INTEGER NOT NULL, state TEXT NOT NULL, failures INTEGER NOT NULL, losses INTEGER NOT NULL,
    error TEXT, result TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (step INTEGER PRIMARY KEY, formation INTEGER NOT NULL, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, subject TEXT NOT NULL, action TEXT NOT NULL, detail TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS delivered_rollouts ON rollouts (step) WHERE state = 'delivered';
CREATE INDEX IF NOT EXISTS open_groups ON groups (ordinal) WHERE state != 'closed';
CREATE INDEX IF NOT EXISTS open_jobs ON jobs (sequence) WHERE state IN ('waiting', 'submitted');
"""
UPSERTS = {
    "rollouts": "INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "groups": "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?)",
    "jobs": "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "batches": "INSERT OR REPLACE INTO batches VALUES (?, ?, ?)",
    "meta": "INSERT OR REPLACE INTO meta VALUES (?, ?)",
    "trained": "UPDATE rollouts SET state = 'trained' WHERE step = ? AND state = 'delivered'",
    "trained_steps": "UPDATE batches SET state = 'trained' WHERE step = ?",
    "events": "INSERT INTO events (at, subject, action, detail) VALUES (?, ?, ?, ?)",
}
# SQLite's locks and shared memory do not hold across hosts, and several of these lose writes silently.
NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs", "gfs2", "gpfs"}
    | {"glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs", "virtiofs", "wekafs"}
)


def open_for_writing(path: Path) -> sqlite3.Connection:
    """For the writer thread alone. FULL: a commit is on the disk before what depends on it leaves the process."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, SCHEMA_VERSION):
        raise LedgerError(f"{path} was written by another version of Penstock (schema {version}, not {SCHEMA_VERSION})")
    connection.executescript(TABLES)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    if not path.exists():
        raise LedgerError(f"there is no ledger at {path}: is this a run directory?")
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)


def refuse_network_file_system(directory: Path, mounts: str | None = None) -> None:
    """`mounts` is the text of /proc/self/mountinfo."""
    if mounts is None:
        table = Path("/proc/self/mountinfo")
        mounts = table.read_text() if table.exists() else ""
    kind = file_system(directory, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise LedgerError(
            f"the ledger cannot lie on a network file system: {directory} is {kind}. "
            'Set ledger_dir to a directory on a local disk, e.g. ledger_dir = "/var/lib/penstock"; '
            "batches and blobs may stay where they are."
        )


def file_system(directory: Path, mounts: str) -> str | None:
    """The type of the mount that holds `directory`: the longest mount point that is one of its parents."""
    held_by: tuple[int, str | None] = (-1, None)
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        mount_point = left.split()[4].encode().decode("unicode_escape")
        if directory.is_relative_to(mount_point) and len(mount_point) >= held_by[0]:
            held_by = (len(mount_point), right.split()[0])
    return held_by[1]
