"""The files that jobs read: JSON in the store, named by key in a message, because groups and steps can be large.

Written by the orchestrator alone, from its ledger, before it submits a job that reads one: if the content has changed,
and at every retry, because the job may have failed for a missing file.
"""

from pydantic import ValidationError

from penstock.batches import BatchPlan, json_records
from penstock.errors import BlobCorrupt, BlobMissing
from penstock.messages import GroupInputs
from penstock.store import Store
from penstock.store.base import KEY

FOLDER = "plans"


def group_key(run: str, group: str) -> str:
    return f"{FOLDER}/{run}.{group}.json"


def step_key(run: str, step: int, formation: int) -> str:
    return f"{FOLDER}/{run}.step_{step:06d}.{formation}.json"


def keys(store: Store, run: str) -> set[str]:
    """Keys of the run's files that exist."""
    return {key for key in store.keys(FOLDER) if key.startswith(f"{FOLDER}/{run}.")}


def write(store: Store, key: str, inputs: GroupInputs | BatchPlan) -> None:
    """Raises BlobUnwritten."""
    content = inputs.model_dump_json().encode() if isinstance(inputs, GroupInputs) else json_records.dumps(inputs)
    store.write(key, content)


def read_group(store: Store, key: str) -> GroupInputs:
    try:
        return GroupInputs.model_validate_json(_read(store, key))
    except ValidationError as error:
        raise BlobCorrupt(f"job input {key} is not a GroupInputs: {error.error_count()} errors") from error


def read_step(store: Store, key: str) -> BatchPlan:
    try:
        return json_records.loads(BatchPlan, _read(store, key))
    except ValueError as error:
        raise BlobCorrupt(f"job input {key} is not a BatchPlan: {error}") from error


def _read(store: Store, key: str) -> bytes:
    folder, _, name = key.partition("/")
    if folder != FOLDER or "/" in name or not KEY.fullmatch(key):
        raise BlobMissing(f"{key!r} is not the key of a job input: it must be a file in {FOLDER}/")
    try:
        return store.read(key)
    except BlobMissing as error:
        raise BlobMissing(
            f"job input {key} is not in {store}: set the same `store` for worker and orchestrator"
        ) from error
