"""Credit: advantages by turn, in small JSON files. The orchestrator has only their keys.

The group phase of an estimator that answers per turn writes one file beside each rollout's columns.
Its batch phase writes one file for a step, which replaces those of its rollouts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headpond.batches import json_records
from headpond.errors import BlobCorrupt
from headpond.store import Store

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The turns of one rollout. Every tuple has one entry per turn."""

    values: tuple[float, ...]  # results of the group phase
    rewards: tuple[float | None, ...]
    agents: tuple[str, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepCredit:
    rollouts: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]  # advantages of each rollout's turns


def credit_key(columns_key: str, execution: str) -> str:
    """The key of a credit file, beside the rollout's columns. No execution overwrites the file of
    another."""
    return f"{columns_key.rpartition('/')[0]}/credit.{execution}.json"


def write_credit(store: Store, key: str, credit: Credit | StepCredit) -> None:
    store.write(key, json_records.dumps(credit))


def read_credit(store: Store, key: str) -> Credit:
    try:
        return json_records.loads(Credit, store.read(key))
    except ValueError as error:
        raise BlobCorrupt(f"{key} does not have the values of a rollout's turns: {error}") from error


def read_step_credit(store: Store, key: str) -> dict[str, Values]:
    try:
        credit = json_records.loads(StepCredit, store.read(key))
        return dict(zip(credit.rollouts, map(np.array, credit.values), strict=True))
    except ValueError as error:
        raise BlobCorrupt(f"{key} does not have the values of a step's turns: {error}") from error
