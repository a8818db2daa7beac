"""metrics.jsonl: one line for every delivered step, in order, whatever crashed. Appended to, never rewritten.

The file itself says which lines it has: what is missing is appended, so that doing it twice, or after a kill, or while
another try is still under way in its thread, changes nothing.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import orjson

from orchestrator.reporting import step_metrics
from penstock.batches import read_manifest
from penstock.errors import BlobError
from penstock.store import Store

NAME = "metrics.jsonl"
TAIL_BYTES = 1 << 20  # holds hundreds of lines; one of a hundred environments takes 50 kB


class MetricsFile:
    def __init__(self, path: Path, store: Store) -> None:
        self.path = path
        self._store = store
        self._writing = threading.Lock()

    def complete(self, lines: Mapping[int, str], *, delivered: int) -> None:
        """Append the lines of all steps before `delivered` that are missing; mend a torn end first. Blocks."""
        with self._writing, os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            last, end = _last_line(file)
            missing = [lines.get(step) or self._from_manifest(step) for step in range(last + 1, delivered)]
            file.truncate(end)
            if missing:
                file.seek(end)
                file.write("".join(f"{line}\n" for line in missing).encode())
                file.flush()
                os.fsync(file.fileno())  # from the next step on the ledger does not keep these lines any more

    def _from_manifest(self, step: int) -> str:
        """A ledger that was lost took the line with it: the manifest still has rewards and sizes."""
        try:
            manifest = read_manifest(self._store, step)
        except (BlobError, OSError):
            manifest = None
        return dumps(step_metrics.of_manifest(manifest) if manifest else {"step": step})


def dumps(values: Mapping[str, float]) -> str:
    """Six digits are more than any of them is worth; whole numbers stay whole."""
    rounded = {key: float(f"{value:.6g}") if type(value) is float else value for key, value in values.items()}
    return orjson.dumps(rounded).decode()


def _last_line(file: IO[bytes]) -> tuple[int, int]:
    """The step of the last whole line (-1: there is none), and where that line ends."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - TAIL_BYTES)
    file.seek(start)
    tail = file.read()
    end = tail.rfind(b"\n") + 1
    while end > 0:
        begin = tail.rfind(b"\n", 0, end - 1) + 1
        if (step := _step(tail[begin : end - 1])) is not None:
            return step, start + end
        end = begin
    return -1, start


def _step(line: bytes) -> int | None:
    try:
        values: Any = orjson.loads(line)
        return int(values["step"])
    except (ValueError, TypeError, KeyError):
        return None
