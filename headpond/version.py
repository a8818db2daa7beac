"""The version of Headpond and the commit that it was built from."""

import functools
import subprocess
from pathlib import Path

VERSION = "0.2.0"
WRITTEN = "commit.txt"
"""File in the package, written when a wheel or an image is built."""
LENGTH = 12


@functools.cache
def commit() -> str | None:
    """Read the commit from the written file, or from git in a clone; None where there is neither."""
    package = Path(__file__).parent
    if (written := package / WRITTEN).exists():
        return written.read_text().strip()[:LENGTH] or None
    if not (package.parent / ".git").exists():  # git would find the repository around a virtual environment
        return None
    try:
        command = ["git", "-C", str(package.parent), "rev-parse", f"--short={LENGTH}", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def release() -> str:
    """`0.2.0 (3f2a9c51d07e)`: processes of one run compare it."""
    return f"{VERSION} ({commit() or 'commit unknown'})"
