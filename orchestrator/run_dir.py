"""A run's directory: `run.json` holds the run's id and the paths of its ledger and store."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from penstock import ids, job_inputs
from penstock.config import RunConfig
from penstock.config.declared import changes, flattened, shared_settings
from penstock.config.redis_address import address
from penstock.errors import RunError, RunMismatch
from penstock.store import atomic

logger = logging.getLogger("penstock.orchestrator")

SETTINGS = {"settings", "identity"}
"""What run.json holds of the configuration: all shared settings, or those that release 0.1 recorded."""
CHANGES_KEPT = 100
"""Changed settings that run.json lists, the latest ones."""


def create_directories(config: RunConfig) -> None:
    """Create the directories that the settings name."""
    for setting, directory in (
        ("run_dir", config.run_dir),
        ("ledger_dir", config.ledger_path.parent),
        ("store", config.store_dir),
    ):
        with explained(directory, setting):
            directory.mkdir(parents=True, exist_ok=True)


def begin_or_resume(config: RunConfig) -> str:
    """The id of the run in `run_dir`, or of a new one. Call under the directory's lock.

    Refuses another value of a setting that is fixed for a run, records what else has changed, and removes files that a
    killed orchestrator left incomplete.
    """
    with explained(config.run_dir):
        stored = read(config.run_dir) if (config.run_dir / "run.json").exists() else {}
        content: dict[str, Any] = {
            "run": stored.get("run") or ids.new_run(),
            "settings": {setting.key: setting.value for setting in shared_settings(config)},
            "changed": stored.get("changed", []),
            "redis": address(config.redis_url),
            "ledger": _relative(config.ledger_path, config.run_dir),
            "store": _relative(config.store_dir, config.run_dir),
        }
        if stored:
            _refuse_second_ledger(config, config.run_dir / stored["ledger"])
            content["changed"] = [*content["changed"], *_changed(config, stored)][-CHANGES_KEPT:]
        if content != stored:
            write_json(config.run_dir / "run.json", content, durable=True)
        _claim_store(config.store_dir, content["run"])
        for directory in (config.run_dir, *config.store_dir.glob("batches/*")):
            atomic.sweep(directory)
        atomic.sweep(config.run_dir / "trainer", "run.json")  # the other files there are the trainer's
        job_inputs.sweep(config.store_dir, content["run"])
    return content["run"]


def read(run_dir: Path) -> dict[str, Any]:
    """The content of `run.json`. Paths below `run_dir` are relative to it, so that a run may be moved."""
    path = run_dir / "run.json"
    try:
        content: Any = orjson.loads(path.read_bytes())
        if not {"run", "redis", "ledger", "store"} <= dict(content).keys() or not SETTINGS & content.keys():
            raise ValueError("keys are missing")
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{run_dir} is not a run directory: there is no {path.name}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}): restore it, or use another run_dir") from error
    return content


def ledger_path(run_dir: Path) -> Path:
    return run_dir / read(run_dir)["ledger"]


def store_path(run_dir: Path) -> Path:
    return run_dir / read(run_dir)["store"]


@contextmanager
def explained(directory: Path, setting: str = "run_dir") -> Iterator[None]:
    """Raise a RunError that names the directory and its setting instead of an OSError."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the directory {directory} cannot be used ({error.strerror}): fix it, or set {setting} to another one"
        ) from error


def write_json(path: Path, content: dict[str, Any], *, durable: bool = False) -> None:
    atomic.write(path, orjson.dumps(content, option=orjson.OPT_INDENT_2), durable=durable)


def _claim_store(store: Path, run: str) -> None:
    """A store belongs to one run: the steps of two runs would have the same names."""
    owner = store / "run"
    if not owner.exists():
        atomic.write(owner, run.encode(), durable=True)
    if owner.read_text() != run:
        raise RunMismatch(f"the store {store} belongs to run {owner.read_text()}: set store to another directory")


def _changed(config: RunConfig, stored: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings that take effect with another value from now on. Refuses those that are fixed for a run."""
    if "settings" in stored:
        found = changes(stored["settings"], config)
    else:  # release 0.1 recorded only settings that are fixed
        found = [change for change in changes(flattened(stored["identity"]), config) if change.declared.fixed]
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


def _refuse_second_ledger(config: RunConfig, stored: Path) -> None:
    if stored.exists() and not config.ledger_path.exists():
        raise RunMismatch(
            f"the ledger of the run in {config.run_dir} is {stored}, and there is none at {config.ledger_path}: "
            "move it there, or set ledger_dir back"
        )


def _relative(path: Path, run_dir: Path) -> str:
    root = run_dir.resolve()
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
