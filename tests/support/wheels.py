"""Builds wheels and source distributions of the working tree, in a copy of it."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
BUILD = "import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"


def copy_tree(directory: Path) -> Path:
    """Copy what git would, with links as links, without `.git`."""
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
        source, target = ROOT / name, directory / name
        if name and (source.is_symlink() or source.is_file()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return directory


def build(tree: Path, out: Path, hook: str = "build_wheel") -> tuple[Path, str]:
    """Return the file that the build wrote and what it printed."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", BUILD.format(hook=hook), str(out)]
    done = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True)
    [built] = out.iterdir()
    return built, done.stdout
