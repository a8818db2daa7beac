"""The files that jobs read: JSON in the store, named by key in a message, because groups and steps can be large.

Written by the orchestrator alone, from its ledger, whenever it submits a job that reads one. A batch phase writes two
files for others.
"""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from headpond.batches import BatchPlan, json_records
from headpond.errors import BlobCorrupt, BlobMissing
from headpond.store import Store
from headpond.store.base import KEY

FOLDER = "plans"
Content = BaseModel | BatchPlan
Model = TypeVar("Model", bound=Content)


def key(run: str, name: str) -> str:
    """`name`: the id of a group, the id of a job, or the name of a step's formation."""
    return f"{FOLDER}/{run}.{name}.json"


def step_key(run: str, step: int, formation: int, kind: str = "") -> str:
    """`kind`: which of the step's files, with the execution that wrote it if it is not the orchestrator's."""
    return key(run, f"step_{step:06d}.{formation}{kind and f'.{kind}'}")


def keys(store: Store, run: str) -> set[str]:
    """Keys of the run's files that exist."""
    return {key for key in store.keys(FOLDER) if key.startswith(f"{FOLDER}/{run}.")}


def write(store: Store, key: str, inputs: Content) -> None:
    """Raises BlobUnwritten."""
    content = json_records.dumps(inputs) if isinstance(inputs, BatchPlan) else inputs.model_dump_json().encode()
    store.write(key, content)


def read(store: Store, key: str, kind: type[Model]) -> Model:
    folder, _, name = key.partition("/")
    if folder != FOLDER or "/" in name or not KEY.fullmatch(key):
        raise BlobMissing(f"{key!r} is not the key of a job input: it must be a file in {FOLDER}/")
    try:
        content = store.read(key)
        return kind.model_validate_json(content) if issubclass(kind, BaseModel) else json_records.loads(kind, content)
    except BlobMissing as error:
        raise BlobMissing(
            f"job input {key} is not in {store}: set the same `store` for worker and orchestrator"
        ) from error
    except ValueError as error:  # a ValidationError's text shows the content
        problem = f"{error.error_count()} errors" if isinstance(error, ValidationError) else str(error)
        raise BlobCorrupt(f"job input {key} is not a {kind.__name__}: {problem}") from error
