"""What the dashboard reads of a run directory: run.json, the ledger, the store, the trainer's signals."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from headpond.batches import read_trainer
from headpond.errors import BatchError, NotFound
from headpond.inspection import run_json
from headpond.ledger import queries, schema
from headpond.store import Store, open_store
from headpond.store.opening import run_store_url


class RunFiles:
    def __init__(self, directory: Path, *, may_begin_later: bool = False) -> None:
        """RunError if it is not the directory of a run, unless the run may begin later."""
        self.path = directory.resolve()
        self.name = self.path.name
        self._may_begin_later = may_begin_later
        if not may_begin_later:
            self.identity()

    def identity(self) -> dict[str, Any]:
        """The content of run.json, which a resumed run rewrites. NotFound for a run that has not begun."""
        if self._may_begin_later and not (self.path / "run.json").exists():
            raise NotFound(f"{self.path} has no run yet. This page shows it once `headpond run` has begun it")
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

    def trainer(self) -> dict[str, Any]:
        try:
            return asdict(read_trainer(self.path))
        except (BatchError, OSError) as error:
            return {"error": str(error)}
