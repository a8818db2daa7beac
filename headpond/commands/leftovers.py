"""`headpond gc`: finds and deletes what nothing of a run reads again, by its ledger, its manifests and its settings.

A file that is named by an open record of the ledger, or by the manifest of a step that is not released, is never found.
Deleting needs the run's lock; finding only reads.
"""

import asyncio
import re
import sqlite3
import time
from collections.abc import Iterator, Set
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from headpond import ids
from headpond.batches import manifest_steps, read_manifest
from headpond.batches.manifest import manifest_key
from headpond.batches.plan import BATCHES, step_directory
from headpond.config import RunConfig
from headpond.config.run import Trainer as TrainerSettings
from headpond.errors import LedgerError
from headpond.inspection import run_json
from headpond.inspection.run_state import is_locked
from headpond.ledger import queries, schema
from headpond.ledger.sealed_files import unreleased_keys
from headpond.orchestrator.duties.housekeeping import Reported
from headpond.orchestrator.ledger import restore
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.lock import lock_directory
from headpond.orchestrator.release import SWEPT_AT_ONCE, Releaser, closed_files, releasable, sort_out
from headpond.orchestrator.trainer import Trainer, trainer_state
from headpond.store import Store, open_store
from headpond.store.opening import run_store_url
from headpond.tasks import inputs

RELEASED_STEPS = "of released steps"
UNNAMED = "named by neither ledger nor manifest"
OTHER_RUNS = "of other runs"
OLD_SESSIONS = "of sessions that nothing has touched for a day"
KINDS = (RELEASED_STEPS, UNNAMED, OTHER_RUNS, OLD_SESSIONS)

SESSION_IS_OLD_S = 86_400.0
STEP = re.compile(r"step_(\d+)")


class Leftovers(NamedTuple):
    """Files of one kind: `keys`, or everything below `under` that is not named."""

    kind: str
    under: str
    named: Set[str] = frozenset()
    keys: tuple[str, ...] = ()


def collect(directory: Path, *, dry_run: bool) -> dict[str, Any]:
    """Delete the leftovers of a run, or only count them; `kinds` has files and bytes of each kind."""
    recorded = run_json.read(directory)
    config = _settings(directory, recorded)
    run, store = recorded["run"], open_store(config.store_url)
    kinds: dict[str, dict[str, Any]] = {kind: {"files": 0, "bytes": 0, "example": None} for kind in KINDS}
    troubles = list[str]()
    with nullcontext() if dry_run else lock_directory(directory):
        if not dry_run:
            asyncio.run(_record_releases(config))
        for leftovers in Finder(config, run).find():
            deleting = Reported(f"delete what is below {leftovers.under}")
            with deleting:
                files, kind = _delete(store, leftovers, dry_run=dry_run), kinds[leftovers.kind]
                kind["files"] += len(files)
                kind["bytes"] += sum(files.values())
                kind["example"] = kind["example"] or next(iter(files), None)
            troubles += filter(None, [deleting.text])
    total = {unit: sum(kind[unit] for kind in kinds.values()) for unit in ("files", "bytes")}
    return {"run": run, "store": str(store), "dry_run": dry_run, "kinds": kinds, **total, "troubles": troubles}


def _delete(store: Store, leftovers: Leftovers, *, dry_run: bool) -> dict[str, int]:
    """Name -> bytes of the deleted files."""
    if leftovers.keys:
        files = {key: store.size(key) or 0 for key in leftovers.keys}
        for key in () if dry_run else leftovers.keys:
            store.delete(key)
        return files
    files = store.unnamed(leftovers.under, named=leftovers.named)
    if not dry_run:
        store.sweep(leftovers.under, named=leftovers.named)
    return files


def _settings(directory: Path, recorded: dict[str, Any]) -> RunConfig:
    """The settings of the run's last start that decide what is kept."""
    settings: dict[str, Any] = recorded["settings"]
    trainer = {name: settings[key] for name in TrainerSettings.model_fields if (key := f"trainer.{name}") in settings}
    batch = {"format": settings["batch.format"]} if "batch.format" in settings else {}
    if "output_dir" in recorded:
        batch["output_dir"] = directory / recorded["output_dir"]
    ledger = directory / recorded["ledger"]
    if not ledger.exists():
        raise LedgerError(f"there is no ledger at {ledger}, which says what may be deleted: run this on its host")
    store = run_store_url(directory, recorded["store"])
    places = {"run_dir": directory, "store": store, "ledger_dir": ledger.parent}
    return RunConfig.model_validate({**places, "trainer": trainer, "batch": batch})


async def _record_releases(config: RunConfig) -> None:
    """Release what the trainer has allowed since the orchestrator ended, in the ledger and in the store."""
    ledger = Ledger(config.ledger_path, keep_events_steps=config.trainer.keep_events_steps)
    try:
        trainer = Trainer(config, ledger, accept=False)
        await trainer.read()
        await ledger.committed()
        await Releaser(config, ledger, trainer).run_once()
        await ledger.committed()
    finally:
        ledger.close()


class Finder:
    def __init__(self, config: RunConfig, run: str) -> None:
        self._store = open_store(config.store_url)
        self._run = run
        # A rollout that begins after this listing is not in it; all that is read later only names more files.
        self._rollouts = sorted(self._store.names(ids.run_directory(run)))
        self._ledger = restore.read(config.ledger_path)
        self._ledger_path = config.ledger_path
        self._delivered = self._ledger.state.steps_delivered
        allowed = releasable(config.trainer, trainer_state(config))
        self._released = {kind: max(first, allowed.get(kind, 0)) for kind, first in self._ledger.state.released.items()}

    def find(self) -> Iterator[Leftovers]:
        first = min(self._released["columns_released"], self._delivered)
        steps = [step for step in manifest_steps(self._store) if step >= first]
        sealed = {key for step in steps for key in self._named_by(step) or ()}
        with schema.reading(self._ledger_path) as connection:
            for first in range(0, len(self._rollouts), SWEPT_AT_ONCE):
                names = self._rollouts[first : first + SWEPT_AT_ONCE]
                found = sort_out(names, self._ledger.groups)
                named = found.named | closed_files(connection, self._run, found.closed, self._released) | sealed
                for rollout in [*found.settled, *found.closed]:
                    kind = RELEASED_STEPS if self._is_released(connection, rollout) else UNNAMED
                    yield Leftovers(kind, ids.rollout_directory(self._run, rollout), named)
        yield from self._of_steps()
        yield from self._of_other_runs()
        yield from self._of_sessions()

    def _named_by(self, step: int) -> set[str] | None:
        """Files that the step's manifest names and that are not released; None if there is no manifest."""
        if step < min(self._released["columns_released"], self._released["jsonl_released"]):
            return {manifest_key(step)} if step >= self._released["manifests_released"] else set()
        manifest = read_manifest(self._store, step)
        return unreleased_keys(manifest, self._released) if manifest else None

    def _is_released(self, connection: sqlite3.Connection, rollout: str) -> bool:
        step = queries.step_of(connection, rollout) if ids.RolloutId.match(rollout) else None
        return step is not None and step < self._released["experts_released"]

    def _of_steps(self) -> Iterator[Leftovers]:
        """Of delivered steps: the files of an open step may be on their way into its manifest."""
        for name in sorted(self._store.names(BATCHES)):
            step = int(found[1]) if (found := STEP.fullmatch(name)) else self._delivered
            if step >= self._delivered:
                continue
            named = self._named_by(step)
            if named is not None:  # without its manifest nothing says what it named
                kind = RELEASED_STEPS if step < self._released["columns_released"] else UNNAMED
                yield Leftovers(kind, step_directory(step), named)

    def _of_other_runs(self) -> Iterator[Leftovers]:
        for run in sorted(self._store.names(ids.ROLLOUTS_FOLDER)):
            if run != self._run:
                yield Leftovers(OTHER_RUNS, ids.run_directory(run))
        # The orchestrator deletes those of its own run when it starts and ends; workers may be writing some.
        if others := set(self._store.keys(inputs.FOLDER)) - inputs.keys(self._store, self._run):
            yield Leftovers(OTHER_RUNS, inputs.FOLDER, keys=tuple(sorted(others)))

    def _of_sessions(self) -> Iterator[Leftovers]:
        """Of servers that do not run. Only the store in a directory says when its files were written."""
        for server in sorted(self._store.names(ids.SESSIONS_FOLDER)):
            key = f"{ids.SESSIONS_FOLDER}/{server}"
            directory = self._store.local_path(key)
            if directory.is_dir() and not is_locked(directory / ".lock", if_unreadable=True):
                for session in sorted(directory.iterdir()):
                    if session.is_dir() and _age_s(session) > SESSION_IS_OLD_S:
                        yield Leftovers(OLD_SESSIONS, f"{key}/{session.name}")


def _age_s(directory: Path) -> float:
    return time.time() - max(path.lstat().st_mtime for path in (directory, *directory.rglob("*")))
