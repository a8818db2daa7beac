"""Kills programs that an episode left behind. They are found by their working directory, which is the episode's.

The package kills a program's process group when its episode is cancelled or runs out of time, but not while it is still
starting the program: then only the program itself is killed, and the children that it has started go on.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

REMOVED = " (deleted)"  # how the kernel marks a directory that is gone


def kill_programs_in(directory: str) -> None:
    """For a directory whose episodes have all ended."""
    _kill(lambda workdir: Path(workdir).is_relative_to(directory))


def kill_programs_of_ended_episodes(directory: str) -> None:
    """The package has removed the working directory of an episode that has ended."""
    _kill(lambda workdir: workdir.endswith(REMOVED) and Path(workdir).is_relative_to(directory))


def _kill(is_left_behind: Callable[[str], bool]) -> None:
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if is_left_behind(str(link.readlink())):
                os.kill(int(link.parent.name), signal.SIGKILL)
