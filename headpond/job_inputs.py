"""The files that jobs read: JSON in the store, named by key in a message, because groups and steps can be large.

Written by the orchestrator alone, from its ledger, before it submits a job that reads one: if the content has changed,
and at every retry, because the job may have failed for a missing file. A batch phase writes two files for
others: the advantages of a step, which the orchestrator reads, and those of its turns, which it only names.
"""

from typing import TypeVar

from pydantic import ValidationError

from headpond.batches import BatchPlan, json_records
from headpond.errors import BlobCorrupt, BlobMissing
from headpond.messages import DrawInputs, GroupInputs, StepAdvantages, StepValues, WireModel
from headpond.store import Store
from headpond.store.base import KEY

FOLDER = "plans"
Content = GroupInputs | DrawInputs | StepValues | StepAdvantages | BatchPlan
Model = TypeVar("Model", bound=WireModel)


def group_key(run: str, group: str) -> str:
    return f"{FOLDER}/{run}.{group}.json"


def job_key(run: str, job: str) -> str:
    return f"{FOLDER}/{run}.{job}.json"


def step_key(run: str, step: int, formation: int) -> str:
    return f"{FOLDER}/{run}.step_{step:06d}.{formation}.json"


def values_key(run: str, step: int, formation: int) -> str:
    return f"{FOLDER}/{run}.step_{step:06d}.{formation}.values.json"


def advantages_key(run: str, step: int, formation: int, execution: str) -> str:
    """No execution overwrites the file of another."""
    return f"{FOLDER}/{run}.step_{step:06d}.{formation}.advantages.{execution}.json"


def step_credit_key(run: str, step: int, formation: int, execution: str) -> str:
    """The advantages of a step's turns, which its batch phase wrote; read by the encoding jobs."""
    return f"{FOLDER}/{run}.step_{step:06d}.{formation}.credit.{execution}.json"


def keys(store: Store, run: str) -> set[str]:
    """Keys of the run's files that exist."""
    return {key for key in store.keys(FOLDER) if key.startswith(f"{FOLDER}/{run}.")}


def write(store: Store, key: str, inputs: Content) -> None:
    """Raises BlobUnwritten."""
    content = json_records.dumps(inputs) if isinstance(inputs, BatchPlan) else inputs.model_dump_json().encode()
    store.write(key, content)


def read_group(store: Store, key: str) -> GroupInputs:
    return _read_model(GroupInputs, store, key)


def read_draw(store: Store, key: str) -> DrawInputs:
    return _read_model(DrawInputs, store, key)


def read_values(store: Store, key: str) -> StepValues:
    return _read_model(StepValues, store, key)


def read_advantages(store: Store, key: str) -> StepAdvantages:
    return _read_model(StepAdvantages, store, key)


def read_step(store: Store, key: str) -> BatchPlan:
    try:
        return json_records.loads(BatchPlan, _read(store, key))
    except ValueError as error:
        raise BlobCorrupt(f"job input {key} is not a BatchPlan: {error}") from error


def _read_model(kind: type[Model], store: Store, key: str) -> Model:
    try:
        return kind.model_validate_json(_read(store, key))
    except ValidationError as error:
        raise BlobCorrupt(f"job input {key} is not a {kind.__name__}: {error.error_count()} errors") from error


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
