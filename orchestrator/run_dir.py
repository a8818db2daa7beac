"""A run's directory: who it is (`run.json`), what it is doing (`status.json`), what it made (`batches/`)."""

import os
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from orchestrator.broker import address
from penstock.config import RunConfig
from penstock.errors import RunError, RunMismatch

# What a run is made of: a directory that was begun with other values cannot be gone on with.
IDENTITY = ("seed", "environments", "rollouts.group_size", "batch.unit", "batch.size", "batch.data_ranks")


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    id: str
    """random, made with the directory"""
    new: bool


def enter(config: RunConfig) -> RunIdentity:
    """Create the directory, or find out that it is a run of this configuration."""
    path = config.run_dir / "run.json"
    identity = {key: _value(config, key) for key in IDENTITY}
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        if new:
            _begin(path, config, identity)
        kept = read(config.run_dir)
        _claim_store(config.store_dir, kept["run"])
    except OSError as error:
        raise RunError(f"the run directory {config.run_dir} cannot be used: {error.strerror}") from error
    different = [f"{key} was {kept['identity'].get(key)!r}, now {value!r}" for key, value in identity.items()
                 if kept["identity"].get(key) != value]  # fmt: skip
    if different:
        raise RunMismatch(f"{config.run_dir} holds a run of another configuration ({'; '.join(different)}): "
                          "use another run_dir, or the settings it was begun with")  # fmt: skip
    return RunIdentity(id=kept["run"], new=new)


def _begin(path: Path, config: RunConfig, identity: dict[str, object]) -> None:
    about = {"redis": address(config.redis_url), "ledger": str(config.ledger_path), "store": str(config.store_dir)}
    write_atomically(path, {"run": uuid.uuid4().hex[:12], "identity": identity, **about})


def _claim_store(store: Path, run: str) -> None:
    """A store is one run's: steps of two runs would have the same names."""
    store.mkdir(parents=True, exist_ok=True)
    owner = store / "run"
    if not owner.exists():
        owner.write_text(run)
    if owner.read_text() != run:
        raise RunMismatch(f"the store {store} belongs to run {owner.read_text()}: give this run a store of its own")


def read(run_dir: Path, name: str = "run.json") -> dict[str, Any]:
    path = run_dir / name
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunError(f"{run_dir} is not a run directory: there is no {path.name}") from None
    except orjson.JSONDecodeError as error:
        raise RunError(f"{path} cannot be read: {error}") from error


def write_atomically(path: Path, content: dict[str, Any]) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(orjson.dumps(content, option=orjson.OPT_INDENT_2))
        Path(temporary).rename(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _value(config: RunConfig, key: str) -> object:
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return value
