"""A run's directory: `run.json` holds the run's id and the paths of its ledger and store."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from headpond import ids
from headpond.batches.plan import BATCHES
from headpond.config import RunConfig
from headpond.config.declared import changes, shared_settings
from headpond.config.redis_address import address
from headpond.errors import HeadpondError, RunError, RunMismatch, raised_at, text_of
from headpond.inspection.run_json import read
from headpond.ledger import schema
from headpond.orchestrator.duties.housekeeping import Reported
from headpond.store import Store, atomic, open_store
from headpond.store.opening import owner_of, relative_path, stored_url
from headpond.tasks import inputs
from headpond.version import release

logger = logging.getLogger("headpond.orchestrator")

EVALUATIONS = "evaluations.jsonl"
CHANGES_KEPT = 100  # Changed settings that run.json lists, the latest ones.


def create_directories(config: RunConfig) -> None:
    """Create the directories that the settings name, and check that the store can be used."""
    for setting, directory in (("run_dir", config.run_dir), ("ledger_dir", config.ledger_path.parent)):
        with explained(directory, setting):
            directory.mkdir(parents=True, exist_ok=True)
    store = open_store(config.store_url)
    with explained(store, "store"), _explained_store(store):
        store.check()


def begin_or_resume(config: RunConfig) -> str:
    """The id of the run in `run_dir`, or of a new one. Call under the directory's lock.

    Refuses another value of a setting that is fixed for a run, records what else has changed, and removes files that a
    killed orchestrator left incomplete.
    """
    store = open_store(config.store_url)
    with explained(config.run_dir):
        stored = read(config.run_dir) if (config.run_dir / "run.json").exists() else {}
        content: dict[str, Any] = {
            "run": stored.get("run") or ids.new_run(),
            "release": release(),
            "settings": {setting.key: setting.value for setting in shared_settings(config)},
            "changed": stored.get("changed", []),
            "redis": address(config.redis_url),
            "ledger": relative_path(config.run_dir, config.ledger_path),
            "store": stored_url(config.run_dir, config.store_url),
        }
        if config.batch.format != "native":  # where prime-rl's trainer reads and broadcasts, for `headpond gc`
            content["output_dir"] = relative_path(config.run_dir, config.prime_rl_dir)
        if stored:
            _refuse_other_places(config, stored)
            if config.ledger_path.exists():
                with schema.reading(config.ledger_path):  # refuses another release's before anything is written
                    pass
            content["changed"] = [*content["changed"], *_changed(config, stored)][-CHANGES_KEPT:]
        with _explained_store(store):
            _refuse_store_of_another_run(store, content["run"])
        if content != stored:
            write_json(config.run_dir / "run.json", content, durable=True)
        with _explained_store(store):
            # After run.json: a kill in between must not leave a store that belongs to a run without a directory.
            if owner_of(store) is None:
                store.create(ids.OWNER_KEY, content["run"].encode())
            _refuse_store_of_another_run(store, content["run"])
    for folder in (BATCHES, inputs.FOLDER):
        with Reported(f"remove incomplete files of {folder}"):
            store.tidy(folder)
    with Reported(f"remove incomplete files of {config.run_dir}"):
        atomic.sweep(config.run_dir)
        for name in ("run.json", "start.json"):  # the other files there are the trainer's
            atomic.sweep(config.run_dir / "trainer", name)
    return content["run"]


@contextmanager
def explained(directory: Path | Store, setting: str = "run_dir") -> Iterator[None]:
    """Raise a RunError that names the directory and its setting instead of an OSError."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the directory {directory} cannot be used ({error.strerror}): fix it, or set {setting} to another one"
        ) from error


@contextmanager
def _explained_store(store: Store) -> Iterator[None]:
    """Raise a RunError in place of any error of a store from outside the project."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RunError) or store.url.startswith("file:"):
            raise
        why = str(error) if isinstance(error, HeadpondError) else f"{text_of(error)}, {raised_at(error)}"
        raise RunError(
            f"the store URL {store.url} cannot be used ({why}): repair its class, or set store to another one"
        ) from error


def write_json(path: Path, content: dict[str, Any], *, durable: bool = False) -> None:
    atomic.write(path, orjson.dumps(content, option=orjson.OPT_INDENT_2), durable=durable)


def _refuse_store_of_another_run(store: Store, run: str) -> None:
    """A store belongs to one run: the steps of two runs would have the same names."""
    if (owner := owner_of(store)) not in (None, run):
        raise RunMismatch(f"the store {store} belongs to run {owner}: set store to another one")


def _changed(config: RunConfig, stored: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings that take effect with another value from now on. Refuses those that are fixed for a run."""
    found = changes(stored["settings"], config)
    if fixed := [str(change) for change in found if change.declared.fixed]:
        raise RunMismatch(
            f"{config.run_dir} holds a run with other settings ({'; '.join(fixed)}): "
            "use another run_dir, or the settings it was started with"
        )
    for change in found:
        workers = " and ".join(change.declared.restarts)
        logger.warning("action=setting_changed %s%s", change, f": restart {workers}" if workers else "")
    at = time.time()
    return [
        {"at": at, "setting": each.key, "was": each.was, "now": each.now, "restart": each.declared.restarts}
        for each in found
    ]


def _refuse_other_places(config: RunConfig, stored: dict[str, Any]) -> None:
    """Another ledger or store is accepted only if the run's files are there."""
    ledger = config.run_dir / stored["ledger"]
    if ledger.exists() and not config.ledger_path.exists():
        raise RunMismatch(
            f"the ledger of the run in {config.run_dir} is {ledger}, and there is none at {config.ledger_path}: "
            "move it there, or set ledger_dir back"
        )
    moved = stored_url(config.run_dir, config.store_url) != stored["store"]
    if moved and owner_of(open_store(config.store_url)) is None:
        raise RunMismatch(
            f"the store of the run in {config.run_dir} is {stored['store']}, and {config.store_url} holds nothing of "
            "it: move its files there, or set store back"
        )
