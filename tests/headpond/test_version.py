"""The commit behind the version, read with git from a clone of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headpond import version

READ = "import runpy, sys; print(runpy.run_path(sys.argv[1])['release']())"
AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@example.org")


def clone_of_its_own(directory: Path) -> str:
    """Make a repository with the module that reads the commit; return the commit."""
    (directory / "headpond").mkdir(parents=True)
    shutil.copy(version.__file__, directory / "headpond")
    git = ["git", "-C", str(directory)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, *AUTHOR, "commit", "--quiet", "--allow-empty", "--message", str(directory)], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def release_of(directory: Path, **variables: str) -> str:
    command = [sys.executable, "-c", READ, str(directory / "headpond" / "version.py")]
    environment = {**os.environ, **variables}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


def test_the_commit_is_that_of_the_clone(tmp_path: Path) -> None:
    commit = clone_of_its_own(tmp_path / "ours")
    assert release_of(tmp_path / "ours") == f"{version.VERSION} ({commit[:12]})"


def test_git_variables_of_another_repository_do_not_change_it(tmp_path: Path) -> None:
    """A hook of git has GIT_DIR; its processes would differ from the run's workers."""
    commit = clone_of_its_own(tmp_path / "ours")
    clone_of_its_own(tmp_path / "theirs")
    read = release_of(tmp_path / "ours", GIT_DIR=str(tmp_path / "theirs" / ".git"))
    assert read == f"{version.VERSION} ({commit[:12]})"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a clone to another user")
def test_every_user_of_a_shared_clone_reads_the_same_commit(tmp_path: Path) -> None:
    commit = clone_of_its_own(tmp_path / "ours")
    for path in [tmp_path / "ours", *(tmp_path / "ours").rglob("*")]:
        os.chown(path, 12345, 12345)
    assert release_of(tmp_path / "ours") == f"{version.VERSION} ({commit[:12]})"


def test_a_written_commit_comes_first_and_without_both_it_is_unknown(tmp_path: Path) -> None:
    clone_of_its_own(tmp_path / "ours")
    written = tmp_path / "ours" / "headpond" / version.WRITTEN
    written.write_text("0123456789abcdef\n")
    assert release_of(tmp_path / "ours") == f"{version.VERSION} (0123456789ab)"
    written.unlink()
    shutil.rmtree(tmp_path / "ours" / ".git")
    assert release_of(tmp_path / "ours") == f"{version.VERSION} (commit unknown)"
