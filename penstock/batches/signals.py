"""What trainer and orchestrator tell each other: small files under the run directory's `trainer/`, each replaced whole.

rank_00.json ...    by each data rank: how far it is
policy.json         by the trainer: the newest policy version and its weights
checkpoint.json     by the trainer: the newest step that it will never ask for again
run.json            by the orchestrator: what the run is doing, and whether it has ended
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from penstock.batches import json_records
from penstock.batches.plan import FIRST_STEP
from penstock.errors import BatchError
from penstock.store import atomic

NOTHING = FIRST_STEP - 1  # the newest step of somebody who has had none
Signal = TypeVar("Signal")


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    data_rank: int
    data_ranks: int
    epoch: int
    """how often this rank opened a reader"""
    resume_step: int
    acked: int
    """newest step that it has trained on, in this epoch or before the checkpoint that it came from"""


@dataclass(frozen=True, kw_only=True)
class PublishedPolicy:
    version: int
    weights: str | None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    step: int


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    why: str
    """what the next batch is waiting for, or why the run ended: a sentence for whoever waits"""
    ended: bool = False
    last_step: int = NOTHING
    """newest sealed step; nothing comes after it once the run has ended"""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What the orchestrator sees of a trainer."""

    epoch: int = 0
    """rises when a rank opens a reader again: steps after `acked` are then being delivered once more"""
    data_ranks: int = 0
    acked: int = NOTHING
    """every rank has trained on the steps up to this one; falls when a trainer resumes from an older checkpoint"""
    checkpointed: int = NOTHING
    policy: PublishedPolicy | None = None


def write_status(run_dir: Path, status: RunStatus) -> None:
    """At the orchestrator's start too: a run that is taken up again has not ended any more."""
    _write(run_dir, "run.json", status)


def read_status(run_dir: Path) -> RunStatus | None:
    return _read(run_dir, "run.json", RunStatus)


def write_progress(run_dir: Path, progress: RankProgress) -> None:
    _write(run_dir, f"rank_{progress.data_rank:02d}.json", progress)


def read_progress(run_dir: Path, data_rank: int) -> RankProgress | None:
    return _read(run_dir, f"rank_{data_rank:02d}.json", RankProgress)


def write_policy(run_dir: Path, policy: PublishedPolicy) -> None:
    _write(run_dir, "policy.json", policy)


def write_checkpoint(run_dir: Path, checkpoint: Checkpoint) -> None:
    _write(run_dir, "checkpoint.json", checkpoint)


def read_trainer(run_dir: Path) -> TrainerState:
    checkpoint = _read(run_dir, "checkpoint.json", Checkpoint)
    state = TrainerState(
        checkpointed=checkpoint.step if checkpoint else NOTHING, policy=_read(run_dir, "policy.json", PublishedPolicy)
    )
    first = read_progress(run_dir, 0)
    if first is None:
        return state
    others = (read_progress(run_dir, data_rank) for data_rank in range(1, first.data_ranks))
    # A file that a trainer of another number of ranks left behind says nothing about this one.
    ranks = [first, *(rank for rank in others if rank and rank.data_ranks == first.data_ranks)]
    complete = len(ranks) == first.data_ranks
    return replace(
        state,
        epoch=max(rank.epoch for rank in ranks),
        data_ranks=first.data_ranks,
        acked=min(rank.acked for rank in ranks) if complete else NOTHING,
    )


def _write(run_dir: Path, name: str, signal: object) -> None:
    atomic.write_durably(run_dir / "trainer" / name, json_records.dumps(signal))


def _read(run_dir: Path, name: str, kind: type[Signal]) -> Signal | None:
    path = run_dir / "trainer" / name
    try:
        return json_records.loads(kind, path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise BatchError(f"{path} was written by something else: {error}; move it away") from error
