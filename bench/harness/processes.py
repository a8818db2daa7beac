"""Children of a benchmark that answer lines."""

import subprocess
import sys


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
