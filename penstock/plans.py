"""The plans of groups and steps: JSON files in the store, named by key in a message, because they grow.

Written by the orchestrator alone, from its ledger, before every submission of a job that needs one: a plan that is lost
is written again.
"""

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from penstock import atomic_files
from penstock.errors import BlobCorrupt, BlobMissing
from penstock.messages import Message

Plan = TypeVar("Plan", bound=Message)
FOLDER = "plans"


def group_key(run: str, group: str) -> str:
    return f"{FOLDER}/{run}.{group}.json"


def step_key(run: str, step: int, formation: int) -> str:
    return f"{FOLDER}/{run}.step_{step:06d}.{formation}.json"


def keys(store: Path, run: str) -> set[str]:
    """Those of `run` that are there."""
    return {f"{FOLDER}/{path.name}" for path in (store / FOLDER).glob(f"{run}.*.json")}


def write(store: Path, key: str, plan: Message) -> None:
    path = _path(store, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write(path, plan.model_dump_json().encode())


def sweep(store: Path, run: str) -> None:
    """What a killed orchestrator of `run` left half-written."""
    atomic_files.sweep(store / FOLDER, f"{run}.")


def read(store: Path, key: str, model: type[Plan]) -> Plan:
    try:
        return model.model_validate_json(_path(store, key).read_bytes())
    except FileNotFoundError as error:
        raise BlobMissing(
            f"the plan {key} is not in the store {store}: do worker and orchestrator share it?"
        ) from error
    except ValidationError as error:
        raise BlobCorrupt(f"the plan {key} cannot be read: {error.error_count()} errors") from error


def delete(store: Path, key: str) -> None:
    _path(store, key).unlink(missing_ok=True)


def _path(store: Path, key: str) -> Path:
    folder, _, name = key.partition("/")
    if folder != FOLDER or "/" in name or name.startswith("."):
        raise BlobMissing(f"{key!r} is not the key of a plan")
    return store / FOLDER / name
