"""The files that jobs read: JSON in the store, named by key in a message, because groups and steps can be large.

Written by the orchestrator alone, from its ledger, before it submits a job that reads one: if the content has changed,
and at every retry, because the job may have failed for a missing file.
"""

from pathlib import Path

from pydantic import ValidationError

from penstock.batches import BatchPlan, json_records
from penstock.errors import BlobCorrupt, BlobMissing
from penstock.messages import GroupInputs
from penstock.store import atomic

FOLDER = "plans"


def group_key(run: str, group: str) -> str:
    return f"{FOLDER}/{run}.{group}.json"


def step_key(run: str, step: int, formation: int) -> str:
    return f"{FOLDER}/{run}.step_{step:06d}.{formation}.json"


def keys(store: Path, run: str) -> set[str]:
    """Keys of the run's files that exist."""
    return {f"{FOLDER}/{path.name}" for path in (store / FOLDER).glob(f"{run}.*.json")}


def write(store: Path, key: str, inputs: GroupInputs | BatchPlan) -> None:
    """Raises OSError."""
    path = _path(store, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = inputs.model_dump_json().encode() if isinstance(inputs, GroupInputs) else json_records.dumps(inputs)
    atomic.write(path, content)


def read_group(store: Path, key: str) -> GroupInputs:
    try:
        return GroupInputs.model_validate_json(_read(store, key))
    except ValidationError as error:
        raise BlobCorrupt(f"job input {key} is not a GroupInputs: {error.error_count()} errors") from error


def read_step(store: Path, key: str) -> BatchPlan:
    try:
        return json_records.loads(BatchPlan, _read(store, key))
    except ValueError as error:
        raise BlobCorrupt(f"job input {key} is not a BatchPlan: {error}") from error


def delete(store: Path, key: str) -> None:
    _path(store, key).unlink(missing_ok=True)


def sweep(store: Path, run: str) -> None:
    """Remove the temporary files that a killed orchestrator of `run` left."""
    atomic.sweep(store / FOLDER, f"{run}.")


def _read(store: Path, key: str) -> bytes:
    try:
        return _path(store, key).read_bytes()
    except FileNotFoundError as error:
        raise BlobMissing(
            f"job input {key} is not in {store}: set the same `store` for worker and orchestrator"
        ) from error


def _path(store: Path, key: str) -> Path:
    folder, _, name = key.partition("/")
    if folder != FOLDER or "/" in name or name.startswith("."):
        raise BlobMissing(f"{key!r} is not the key of a job input: it must be a file in {FOLDER}/")
    return store / FOLDER / name
