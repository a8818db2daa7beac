"""The version of Headpond and the commit that it was built from."""

import functools
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERSION = "0.2.0"
WRITTEN = "commit.txt"  # File in the package, written when a wheel or an image is built.
LENGTH = 12


@functools.cache
def commit() -> str | None:
    """Read the commit from the written file, or from git in a clone. Return None without either."""
    package = Path(__file__).parent
    if (written := package / WRITTEN).exists():
        return written.read_text().strip()[:LENGTH] or None
    # git would find the repository around a virtual environment.
    if not (package.parent / ".git").exists():
        return None
    # A git hook's variables name another repository and must not count. The owner of a shared clone
    # must not matter either.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "safe.directory=*", "-C", str(package.parent), "rev-parse", "HEAD"]
    try:
        read = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return read.stdout.strip()[:LENGTH]
    except (OSError, subprocess.CalledProcessError):
        return None


def release() -> str:
    """Return `0.2.0 (3f2a9c51d07e)`: processes of one run compare it."""
    return f"{VERSION} ({commit() or 'commit unknown'})"


def refuse_old_run(path: Path, content: Mapping[str, Any]) -> None:
    """Raise if Penstock, as Headpond was called before 0.2.0, wrote this run.json."""
    if {"run", "ledger", "store"} <= content.keys() and "release" not in content:
        from headpond.errors import (
            RunError,  # deploy/build_hooks.py runs this module before the package can be imported
        )

        raise RunError(
            f"{path} was written by Penstock, which is called Headpond since version 0.2.0: finish that run with "
            "Penstock 0.1.0, or set run_dir to a new directory"
        )
