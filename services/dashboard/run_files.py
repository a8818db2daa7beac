"""A run directory's small files: run.json, status.json, the lock, the trainer's signals. Each may be missing."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from sqlite3 import Connection
from typing import Any

import orjson

from penstock.batches import read_trainer
from penstock.errors import BatchError
from penstock.inspection import run_json
from penstock.ledger import queries, schema
from penstock.store import Store, open_store
from penstock.store.opening import run_store_url

SILENT_S = 10.0  # ten statuses are missing


class RunFiles:
    def __init__(self, directory: Path) -> None:
        """RunError if it is not the directory of a run."""
        self.path = directory.resolve()
        self.name = self.path.name
        self.identity()

    def identity(self) -> dict[str, Any]:
        """The content of run.json, which a resumed run rewrites."""
        return run_json.read(self.path)

    @contextmanager
    def ledger(self) -> Iterator[Connection]:
        """The ledger of one moment. LedgerError if it cannot be read; it may be on another host."""
        path = self.path / self.identity()["ledger"]
        with schema.reading(path) as connection, queries.snapshot(connection):
            yield connection

    def store(self) -> Store:
        return open_store(run_store_url(self.path, self.identity()["store"]))

    def settings(self) -> dict[str, Any]:
        """Dotted name -> value, without paths, addresses and secrets."""
        identity = self.identity()
        return identity.get("settings") or {}

    def status(self) -> dict[str, Any]:
        """The last one, which the orchestrator writes once a second; empty before the first."""
        try:
            return orjson.loads((self.path / "status.json").read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return {}

    def trainer(self) -> dict[str, Any]:
        try:
            return asdict(read_trainer(self.path))
        except (BatchError, OSError) as error:
            return {"error": str(error)}

    def state(self, status: dict[str, Any]) -> str:
        """running, silent (its process is there but writes no status), starting, stopped, done."""
        if not self._locked():
            return "done" if status.get("phase") == "done" else "stopped"
        if not status:
            return "starting"
        return "silent" if time.time() - status["at"] > SILENT_S else "running"

    def _locked(self) -> bool:
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def waiting_for(self, status: dict[str, Any], state: str) -> list[str]:
        """Why the run does not move, as its last status says it, or because no process writes one."""
        if state == "running":
            return status.get("waiting_for") or []
        if state == "silent":
            why = "it is paused, it hangs (kill -USR1 PID logs its stacks), or its disk is full"
            return [f"the orchestrator has written no status for {time.time() - status['at']:.0f} s: {why}"]
        if state == "stopped":
            ended = {"running": "its process has died", None: "it has not started working yet"}
            why = status.get("stopped_by") or ended.get(status.get("phase"), "it was stopped")
            return [f"the orchestrator is not running ({why}): `penstock run` resumes the run"]
        return []
