"""A command on a pseudo-terminal: its output, and keys to send."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from types import TracebackType
from typing import Self

from support.waiting import HANG_S, wait_until

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class Terminal:
    """`with Terminal(*command, env=...) as terminal: ...`"""

    def __init__(self, *command: str, env: dict[str, str], rows: int = 40, columns: int = 120) -> None:
        self._blocks: list[bytes] = []
        self._keyboard, screen = pty.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        # The first terminal that a session's leader opens becomes its controlling terminal: Ctrl-C reaches it.
        opened = ["sh", "-c", 'exec "$@" <"$PTY" >"$PTY" 2>&1', "sh", *command]
        # Programs that read these variables prefer them to the size of the terminal.
        size = {"LINES": str(rows), "COLUMNS": str(columns)}
        env = env | size | {"TERM": "xterm-256color", "PTY": os.ttyname(screen)}
        self._process = subprocess.Popen(opened, env=env, start_new_session=True)
        self._screen = os.fdopen(screen)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def raw(self) -> str:
        return b"".join(self._blocks).decode(errors="replace")

    @property
    def text(self) -> str:
        """All output without colours and cursor movements."""
        return CONTROL.sub("", self.raw)

    def wait_for(self, pattern: str, timeout_s: float = HANG_S) -> None:
        """Until the output has `pattern`, a regular expression. Views repaint at intervals: they may skip a number."""
        try:
            wait_until(lambda: re.search(pattern, self.text), timeout_s=timeout_s, what=pattern)
        except AssertionError as error:
            raise AssertionError(f"{error}; it wrote:\n{self.text[-3000:]}") from None

    def press(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def wait(self, timeout_s: float = HANG_S) -> int:
        """The exit code; from then on `text` is complete."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end; it wrote:\n{self.text[-3000:]}") from None
        self._screen.close()
        self._reader.join()
        return code

    def _read(self) -> None:
        """Read until no process has the screen open."""
        try:
            while block := os.read(self._keyboard, 65536):
                self._blocks.append(block)
        except OSError:  # how Linux reports the end of a terminal
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()
        os.close(self._keyboard)
