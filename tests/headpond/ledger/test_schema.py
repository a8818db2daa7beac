import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headpond.errors import LedgerError
from headpond.ledger import schema

# Lines as the kernel writes them: containers, a laptop, a cluster's node.
MOUNTS = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
26 22 0:24 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,inode64
95 22 0:49 /export/home /home rw,relatime shared:51 - nfs4 filer:/export/home rw,vers=4.2,hard,proto=tcp
96 95 259:3 / /home/ada/scratch rw,relatime shared:52 - xfs /dev/nvme1n1 rw,attr2,inode64
97 22 0:50 / /mnt/my\040data rw,relatime shared:53 - fuse.sshfs ada@filer:/data rw,user_id=1000
98 22 0:51 / /scratch rw,noatime - lustre 10.0.0.1@tcp:/scratch rw,flock,lazystatfs
99 22 0:52 / /mnt/über rw - cifs //filer/über rw,vers=3.1.1
120 22 0:60 / /cache rw,relatime - autofs systemd-1 rw,fd=42
121 120 0:61 / /cache rw,relatime - btrfs /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/var/lib/headpond", "ext4"),
        ("/dev/shm/run", "tmpfs"),
        ("/home/ada/run", "nfs4"),
        ("/home/ada/scratch/run", "xfs"),
        ("/homes/run", "ext4"),
        ("/mnt/my data/run", "fuse.sshfs"),
        ("/mnt/über/run", "cifs"),
        ("/scratch", "lustre"),
        ("/cache/run", "btrfs"),
    ],
)
def test_a_directory_is_on_the_innermost_mount_mounted_last(directory: str, kind: str) -> None:
    assert schema.file_system(Path(directory), MOUNTS.strip()) == kind


@pytest.mark.parametrize("directory", ["/home/ada/run", "/mnt/my data", "/scratch/run", "/mnt/über"])
def test_a_network_file_system_is_refused_with_the_setting_to_change(directory: str) -> None:
    with pytest.raises(LedgerError, match=r"network file system: .*ledger_dir"):
        schema.refuse_network_file_system(Path(directory), MOUNTS.strip())


@pytest.mark.parametrize("directory", ["/var/lib/headpond", "/home/ada/scratch", "/dev/shm"])
def test_a_local_disk_is_accepted(directory: str) -> None:
    schema.refuse_network_file_system(Path(directory), MOUNTS.strip())


def test_the_mounts_of_this_machine_are_parsed(tmp_path: Path) -> None:
    assert schema.file_system(tmp_path.resolve(), Path("/proc/self/mountinfo").read_text())


def test_reading_leaves_no_file_behind(tmp_path: Path) -> None:
    path = tmp_path / "with ? and # and %20" / "ledger.sqlite"
    path.parent.mkdir()
    schema.open_for_writing(path).close()
    with schema.reading(path) as connection:
        assert connection.execute("SELECT count(*) FROM rollouts").fetchone() == (0,)
    assert [file.name for file in path.parent.iterdir()] == ["ledger.sqlite"]


def test_a_reader_sees_what_a_writer_has_committed_and_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(schema.open_for_writing(path)) as writer:
        writer.execute("INSERT INTO state VALUES ('run', '', 0, '{}')")
        with schema.reading(path) as connection:
            assert connection.execute("SELECT * FROM state").fetchall() == [("run", "", 0, "{}")]
        with pytest.raises(LedgerError, match="readonly"), schema.reading(path) as connection:
            connection.execute("DELETE FROM state")


@pytest.mark.parametrize("version", [schema.SCHEMA_VERSION - 1, schema.SCHEMA_VERSION + 1])
def test_a_ledger_of_another_version_is_refused_and_unchanged(tmp_path: Path, version: int) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    for opened in (schema.open_for_reading, schema.open_for_writing):
        with pytest.raises(LedgerError, match=rf"schema {version}, not {schema.SCHEMA_VERSION}\).*run_dir"):
            opened(path)
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE notes (text); INSERT INTO notes VALUES ('mine')")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="it has tables, but no version of the schema"):
        schema.open_for_writing(path)
    assert path.read_bytes() == before


def test_a_file_that_is_not_a_ledger_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_text("these are notes, not a ledger; " * 100)
    for opened in (schema.open_for_reading, schema.open_for_writing):
        with pytest.raises(LedgerError, match="file is not a database"):
            opened(path)
    assert path.read_text().startswith("these are notes")


def test_reading_does_not_create_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        schema.open_for_reading(tmp_path / "ledger.sqlite")
    assert not list(tmp_path.iterdir())
