"""evaluations.jsonl: a line for each evaluation that is done, in the order of their ends, completed from the ledger.

Which lines are missing is read from the file itself, so that a kill neither loses nor doubles one.
"""

import asyncio
import os
from pathlib import Path

from headpond.config import RunConfig
from headpond.event_loop.offload import to_its_end_in_io_thread
from headpond.ledger import schema
from headpond.ledger.evaluations import results_after
from headpond.orchestrator.duties.housekeeping import Reported
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.reporting.metrics import last_line

FILE_NAME = "evaluations.jsonl"
EVERY_S = 1.0


class EvaluationsFile:
    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._path = config.run_dir / FILE_NAME
        self._ledger_path = config.ledger_path
        self._ledger = ledger
        self._written = -1
        """number of its last line; -1 before the first look"""
        self.writing = Reported(f"write {self._path}", "free space or repair the disk")

    def resume(self) -> None:
        """A rebuilt ledger does not know how many lines there are."""
        if self._path.exists():
            with self._path.open("rb") as file:
                last, _ = last_line(file, "evaluation")
            self._ledger.state.evaluations_finished = max(last, self._ledger.state.evaluations_finished)

    async def run(self) -> None:
        while True:
            await self.write()
            await asyncio.sleep(EVERY_S)

    async def write(self) -> None:
        """Lines wait in the ledger while the file cannot be written; the run continues."""
        if self._written >= self._ledger.state.evaluations_finished:
            return
        with self.writing:
            self._written = await to_its_end_in_io_thread(_complete, self._path, self._ledger_path)


def _complete(path: Path, ledger: Path) -> int:
    """Cut off a partial last line and append the missing ones; returns the number of the last line. Blocks."""
    with schema.reading(ledger) as connection:
        if not path.exists() and not results_after(connection, 0):
            return 0
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            last, end = last_line(file, "evaluation")
            missing = results_after(connection, max(last, 0))
            file.truncate(end)
            if missing:
                file.seek(end)
                file.write("".join(f"{line}\n" for _, line in missing).encode())
                file.flush()
                os.fsync(file.fileno())
    return missing[-1][0] if missing else max(last, 0)
