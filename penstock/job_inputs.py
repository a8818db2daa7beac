"""The plans of groups and steps: JSON files in the store, named by key in a message, because they grow.

Written by the orchestrator alone, from its ledger, before a job that needs one is submitted: when it has changed, and
whenever a job is tried again, for the file may be what it lacked.
"""

from pathlib import Path

from pydantic import ValidationError

from penstock.batches import BatchPlan, json_records
from penstock.errors import BlobCorrupt, BlobMissing
from penstock.messages import GroupPlan
from penstock.store import atomic

FOLDER = "plans"


def group_key(run: str, group: str) -> str:
    return f"{FOLDER}/{run}.{group}.json"


def step_key(run: str, step: int, formation: int) -> str:
    return f"{FOLDER}/{run}.step_{step:06d}.{formation}.json"


def keys(store: Path, run: str) -> set[str]:
    """Those of `run` that are there."""
    return {f"{FOLDER}/{path.name}" for path in (store / FOLDER).glob(f"{run}.*.json")}


def write(store: Path, key: str, plan: GroupPlan | BatchPlan) -> None:
    path = _path(store, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = plan.model_dump_json().encode() if isinstance(plan, GroupPlan) else json_records.dumps(plan)
    atomic.write(path, content)


def sweep(store: Path, run: str) -> None:
    """What a killed orchestrator of `run` left half-written."""
    atomic.sweep(store / FOLDER, f"{run}.")


def read_group(store: Path, key: str) -> GroupPlan:
    try:
        return GroupPlan.model_validate_json(_read(store, key))
    except ValidationError as error:
        raise BlobCorrupt(f"the plan {key} cannot be read: {error.error_count()} errors") from error


def read_step(store: Path, key: str) -> BatchPlan:
    try:
        return json_records.loads(BatchPlan, _read(store, key))
    except ValueError as error:
        raise BlobCorrupt(f"the plan {key} cannot be read: {error}") from error


def delete(store: Path, key: str) -> None:
    _path(store, key).unlink(missing_ok=True)


def _read(store: Path, key: str) -> bytes:
    try:
        return _path(store, key).read_bytes()
    except FileNotFoundError as error:
        raise BlobMissing(f"the plan {key} is not in {store}: do worker and orchestrator share the store?") from error


def _path(store: Path, key: str) -> Path:
    folder, _, name = key.partition("/")
    if folder != FOLDER or "/" in name or name.startswith("."):
        raise BlobMissing(f"{key!r} is not the key of a plan")
    return store / FOLDER / name
