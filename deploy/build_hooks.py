"""Writes the commit into wheels and source distributions; pyproject.toml names its classes."""

import runpy
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

version = runpy.run_path("headpond/version.py")

for name in ("tasks", "workers", "orchestrator"):
    folder = Path("headpond", name)
    if (folder.is_symlink() or folder.exists()) and not folder.is_dir():
        raise SystemExit(
            f"{folder} is not a folder: this copy of the repository lost its links ({folder} -> ../{name}). "
            "Clone it with git, on Windows with `git clone -c core.symlinks=true`"
        )


def write_commit(package: Path) -> None:
    if commit := version["commit"]():
        (package / version["WRITTEN"]).write_text(f"{commit}\n")
    else:
        print("headpond: no git and no headpond/commit.txt: this build does not know its commit")


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib, "headpond"))


class SourcesWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        own = [name for name in files if not name.startswith("tests/")]  # setuptools adds a few tests
        # A wheel that is built from the archive needs this module.
        super().make_release_tree(base_dir, [*own, "deploy/build_hooks.py"])
        write_commit(Path(base_dir, "headpond"))
