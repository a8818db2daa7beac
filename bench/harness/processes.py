"""Processes of a benchmark: servers whose port is in their log, and children that answer lines."""

import re
import subprocess
import sys

from penstock.runtime.child_process import ChildProcess

LISTENING = re.compile(r"url=http://127\.0\.0\.1:(\d+)")
LISTEN_S = 60.0


def listening_port(process: ChildProcess) -> int:
    """Wait until a server has logged its URL. Returns its port."""
    match = process.wait_until(lambda: LISTENING.search(process.output), what="it is listening", timeout_s=LISTEN_S)
    assert match is not None
    return int(match[1])


class LineProcess:
    """`python -m MODULE`, a child that replies to each line on its stdin with a line on stdout and exits at EOF."""

    def __init__(self, module: str) -> None:
        # In its own process group: Ctrl-C reaches the benchmark only, and the child exits when its stdin closes.
        self._popen = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.pid = self._popen.pid

    def send(self, line: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{line}\n")
        self._popen.stdin.flush()

    def receive(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline()

    def close(self) -> None:
        self._popen.communicate()
