import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.processes import alive
from support.waiting import wait_until

from headpond.environments.verifiers.verifiers_process import kill_programs_in, kill_programs_of_ended_episodes


@contextmanager
def program(directory: Path) -> Iterator[int]:
    """The id of a program's child in `directory`; the program itself has been killed."""
    directory.mkdir(parents=True)
    command = ["/bin/sh", "-c", "sleep 1000 & echo $!; wait"]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        child = int(shell.stdout.readline())
        shell.kill()
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_only_programs_of_ended_episodes_are_killed(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    with (
        program(ours / "ended") as ended,
        program(ours / "played") as played,
        program(tmp_path / "other") as other,
    ):
        shutil.rmtree(ours / "ended")
        shutil.rmtree(tmp_path / "other")
        kill_programs_of_ended_episodes(str(ours))
        wait_until(lambda: not alive(ended))
        assert alive(played)
        assert alive(other)
        kill_programs_in(str(ours))
        wait_until(lambda: not alive(played))
        assert alive(other)
