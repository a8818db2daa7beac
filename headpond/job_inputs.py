"""The files that jobs read: JSON in the store, named by key in a message, because groups and steps can be large.

Written by the orchestrator alone, from its ledger, before it submits a job that reads one: if the content has changed,
and at every retry, because the job may have failed for a missing file. A batch phase writes two files for
others: the advantages of a step, which the orchestrator reads, and those of its turns, which it only names.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from pydantic import ValidationError

from headpond.batches import BatchPlan, BatchRollout, json_records
from headpond.config import RunConfig
from headpond.errors import BlobCorrupt, BlobMissing
from headpond.messages import DrawInputs, GroupInputs, RolloutResult, StepAdvantages, StepValues, WireModel
from headpond.store import BlobRef, Store
from headpond.store.base import KEY

FOLDER = "plans"
NO_BLOB = BlobRef(key="none", size=0, checksum="")  # of rollouts without files: those of the no-op environment
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


def step_values(
    rollouts: Sequence[str],
    groups: Sequence[tuple[str, str, int]],
    results: Sequence[RolloutResult],
    *,
    values: Sequence[float],
    credit: Sequence[str | None],
    state: str | None,
) -> StepValues:
    """Build what a batch phase reads. `groups`: (id, environment, example) of each rollout; `values`: by the estimator.

    240 kB for 4,096 rollouts, in the order of their ids.
    """
    return StepValues(
        rollouts=list(rollouts),
        groups=[group for group, _, _ in groups],
        environments=[environment for _, environment, _ in groups],
        examples=[example for _, _, example in groups],
        values=list(values),
        rewards=[result.reward for result in results],
        named_rewards=[result.rewards for result in results],
        failed=[result.policy_error is not None for result in results],
        agents=[result.agents for result in results],
        agent_rewards=[result.agent_rewards for result in results],
        credit=list(credit),
        completion_tokens=[result.completion_tokens for result in results],
        state=state,
    )


def batch_plan(config: RunConfig, step: int, rollouts: Iterable[BatchRollout], credit: str | None) -> BatchPlan:
    """Build the plan of a step, which its encoding jobs read and its manifest names."""
    return BatchPlan(
        step=step,
        rules=config.batch.packing_rules(),
        rollouts=tuple(rollouts),
        normalise=config.batch.normalise,
        logprobs_mode=config.engine.logprobs_mode,
        fields=config.batch.declared_fields,
        format=config.batch.format,
        credit=credit,
    )


def batch_rollout(
    rollout: str,
    group: str,
    environment: str,
    result: RolloutResult,
    *,
    advantage: float,
    masked: bool,
    credit: str | None,
) -> BatchRollout:
    return BatchRollout(
        rollout=rollout,
        group=group,
        env=environment,
        reward=result.reward,
        advantage=advantage,
        version_first=result.version_first,
        version_last=result.version_last,
        sample_lengths=result.sample_lengths,
        columns=result.columns or NO_BLOB,
        experts=result.experts,
        masked=masked,
        inexact_tokens=result.inexact_tokens,
        credit=credit,
    )


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
