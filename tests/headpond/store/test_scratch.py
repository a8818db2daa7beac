"""Directories of a host for stores that have no local files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headpond.errors import ConfigError
from headpond.store import open_store, scratch

LEFT = """
import os, signal
from headpond.store import open_store
store = open_store("memory://left")
store.part("rollouts/r1/experts").append(b"x")
print(store.spool_dir, flush=True)
store.keep_spool("server")
store.part("sessions/s1/columns", suffix="log").append(b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_claimed", {})


def test_the_directory_of_a_killed_process_is_removed_unless_it_is_kept() -> None:
    killed = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    left = Path(killed.stdout.strip())
    assert [path.name for path in left.rglob(".experts*")]
    store = open_store("memory://left")
    own = store.spool_dir
    assert own != left
    assert not left.exists()
    store.part("rollouts/r2/experts")
    assert list(own.rglob(".experts*")), "a directory in use stays"
    store.keep_spool("server")
    assert store.part_path("sessions/s1/columns", "log").read_bytes() == b"x"


def test_a_running_process_keeps_its_directory() -> None:
    own = open_store("memory://running").spool_dir
    command = [sys.executable, "-c", "from headpond.store import open_store; open_store('memory://running').spool_dir"]
    assert subprocess.run(command).returncode == 0
    assert own.is_dir()


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    home = tmp_path / f"headpond-{os.getuid()}"
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(ConfigError, match="set TMPDIR"):
        _ = open_store("memory://open").spool_dir
