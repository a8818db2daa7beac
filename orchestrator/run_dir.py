"""A run's directory: who it is (`run.json`), what it is doing (`status.json`), what it made (`batches/`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from penstock import ids, job_inputs
from penstock.config import RunConfig
from penstock.config.redis_address import address
from penstock.errors import RunError, RunMismatch
from penstock.store import atomic

# What a run is made of: a directory that was begun with other values cannot be gone on with.
IDENTITY = ("seed", "environments", "rollouts.group_size", "batch.unit", "batch.size", "batch.data_ranks")


def make(config: RunConfig) -> None:
    """The directories that the settings name; called before anything is written into them."""
    for setting, directory in (
        ("run_dir", config.run_dir),
        ("ledger_dir", config.ledger_path.parent),
        ("store", config.store_dir),
    ):
        with usable(directory, setting):
            directory.mkdir(parents=True, exist_ok=True)


def enter(config: RunConfig) -> str:
    """The id of the run that the directory holds, or of the one that begins now. Called under the directory's lock."""
    with usable(config.run_dir):
        kept = read(config.run_dir) if (config.run_dir / "run.json").exists() else {}
        content: dict[str, Any] = {
            "run": kept.get("run") or ids.new_run(),
            "identity": {key: _value(config, key) for key in IDENTITY},
            "redis": address(config.redis_url),
            "ledger": _relative(config.ledger_path, config.run_dir),
            "store": _relative(config.store_dir, config.run_dir),
        }
        if kept:
            _refuse_another_configuration(config.run_dir, kept["identity"], content["identity"])
            _refuse_a_second_ledger(config, config.run_dir / kept["ledger"])
        if content != kept:
            write_json(config.run_dir / "run.json", content, durable=True)
        _claim_store(config.store_dir, content["run"])
        for directory in (config.run_dir, *config.store_dir.glob("batches/*")):
            atomic.sweep(directory)
        atomic.sweep(config.run_dir / "trainer", "run.json")  # the others there are the trainer's
        job_inputs.sweep(config.store_dir, content["run"])
    return content["run"]


def read(run_dir: Path) -> dict[str, Any]:
    """`run.json`. The paths in it are relative to `run_dir` where they lie below it: a run may be moved."""
    path = run_dir / "run.json"
    try:
        content: Any = orjson.loads(path.read_bytes())
        if not {"run", "identity", "redis", "ledger", "store"} <= dict(content).keys():
            raise ValueError("something is missing from it")
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
def usable(directory: Path, setting: str = "run_dir") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the directory {directory} cannot be used ({error.strerror}): mend that, or set {setting} to another one"
        ) from error


def write_json(path: Path, content: dict[str, Any], *, durable: bool = False) -> None:
    atomic.write(path, orjson.dumps(content, option=orjson.OPT_INDENT_2), durable=durable)


def _claim_store(store: Path, run: str) -> None:
    """A store is one run's: steps of two runs would have the same names."""
    owner = store / "run"
    if not owner.exists():
        atomic.write(owner, run.encode(), durable=True)
    if owner.read_text() != run:
        raise RunMismatch(f"the store {store} belongs to run {owner.read_text()}: give this run a store of its own")


def _refuse_another_configuration(run_dir: Path, kept: dict[str, Any], now: dict[str, Any]) -> None:
    different = [f"{key} was {kept.get(key)!r}, now {value!r}" for key, value in now.items() if kept.get(key) != value]
    if different:
        raise RunMismatch(
            f"{run_dir} holds a run of another configuration ({'; '.join(different)}): "
            "use another run_dir, or the settings it was begun with"
        )


def _refuse_a_second_ledger(config: RunConfig, kept: Path) -> None:
    if kept.exists() and not config.ledger_path.exists():
        raise RunMismatch(
            f"the ledger of the run in {config.run_dir} is {kept}, and there is none at {config.ledger_path}: "
            "move it there, or set ledger_dir back"
        )


def _relative(path: Path, run_dir: Path) -> str:
    root = run_dir.resolve()
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _value(config: RunConfig, key: str) -> object:
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return value
