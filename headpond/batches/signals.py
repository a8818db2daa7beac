"""Signals between trainer and orchestrator: small files in the run directory's `trainer/`, replaced atomically.

rank_00.json ...    by each data rank: its progress
policy.json         by the trainer: the newest policy version and its weights
checkpoint.json     by the trainer: the newest step that it will not read again
run.json            by the orchestrator: why the run waits, and whether it has ended
start.json          by the orchestrator: the version that the engine had when the run began, if it has a number
"""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from headpond.batches import json_records
from headpond.batches.plan import FIRST_STEP
from headpond.errors import BatchError
from headpond.store import atomic

FOLDER, POLICY, CHECKPOINT = "trainer", "policy.json", "checkpoint.json"
NOTHING = FIRST_STEP - 1  # stands for "no step yet"
Signal = TypeVar("Signal")


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    data_rank: int
    data_ranks: int
    epoch: int  # number of readers that this rank has opened
    resume_step: int
    # newest step that it has trained on, in this epoch or before the checkpoint that it
    # resumed from
    acked: int


@dataclass(frozen=True, kw_only=True)
class PublishedPolicy:
    version: int
    weights: str | None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    step: int


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    why: str  # a sentence for the trainer: why the next batch waits, or why the run ended
    ended: bool = False
    last_step: int = NOTHING  # newest sealed step; the last one if the run has ended


@dataclass(frozen=True, kw_only=True)
class StartVersion:
    version: int


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The signals of all ranks of a trainer together."""

    # rises when a rank opens a reader again: steps after `acked` are then delivered again
    epoch: int = 0
    data_ranks: int = 0
    # every rank has trained on the steps up to this one; falls when a trainer resumes from an
    # older checkpoint
    acked: int = NOTHING
    # ranks that have opened no reader; if there are none, those that have trained on fewer
    # steps than others
    behind: tuple[int, ...] = ()
    checkpointed: int = NOTHING
    policy: PublishedPolicy | None = None


def write_status(run_dir: Path, status: RunStatus) -> None:
    """Write the run's status. A resumed run writes it too, so that it no longer counts as ended."""
    _write(run_dir, "run.json", status)


def read_status(run_dir: Path) -> RunStatus | None:
    return _read(run_dir, "run.json", RunStatus)


def write_start(run_dir: Path, start: StartVersion) -> None:
    _write(run_dir, "start.json", start)


def read_start(run_dir: Path) -> StartVersion | None:
    return _read(run_dir, "start.json", StartVersion)


def write_progress(run_dir: Path, progress: RankProgress) -> None:
    _write(run_dir, _rank_name(progress.data_rank), progress, data_rank=progress.data_rank)


def remove_leftovers(run_dir: Path, data_rank: int) -> None:
    """Remove the incomplete signals of this rank's killed trainer. Other ranks may be writing theirs."""
    for name in (_rank_name(data_rank), POLICY, CHECKPOINT):
        with contextlib.suppress(OSError):  # a trainer can read its batches although a file stays
            atomic.temporary_path(run_dir / FOLDER / name, _suffix(data_rank)).unlink(missing_ok=True)


def read_progress(run_dir: Path, data_rank: int) -> RankProgress | None:
    return _read(run_dir, _rank_name(data_rank), RankProgress)


def write_policy(run_dir: Path, policy: PublishedPolicy, *, data_rank: int = 0) -> None:
    _write(run_dir, POLICY, policy, data_rank=data_rank)


def write_checkpoint(run_dir: Path, checkpoint: Checkpoint, *, data_rank: int = 0) -> None:
    _write(run_dir, CHECKPOINT, checkpoint, data_rank=data_rank)


def read_trainer(run_dir: Path) -> TrainerState:
    checkpoint = _read(run_dir, CHECKPOINT, Checkpoint)
    state = TrainerState(
        checkpointed=checkpoint.step if checkpoint else NOTHING, policy=_read(run_dir, POLICY, PublishedPolicy)
    )
    first = read_progress(run_dir, 0)
    if first is None:
        return state
    other_ranks = (read_progress(run_dir, data_rank) for data_rank in range(1, first.data_ranks))
    # Files of an earlier trainer with another number of ranks are ignored.
    ranks = [first, *(rank for rank in other_ranks if rank and rank.data_ranks == first.data_ranks)]
    opened = {rank.data_rank: rank.acked for rank in ranks}
    missing = tuple(rank for rank in range(first.data_ranks) if rank not in opened)
    acked = NOTHING if missing else min(opened.values())
    slow = tuple(rank for rank, step in opened.items() if step == acked)
    return replace(
        state,
        epoch=max(rank.epoch for rank in ranks),
        data_ranks=first.data_ranks,
        acked=acked,
        behind=missing or (slow if len(slow) < len(opened) else ()),
    )


def last_signal_at(run_dir: Path) -> float | None:
    """Time at which the trainer last wrote one of its files, as seconds since 1970; None if it has
    written none."""
    folder = run_dir / FOLDER
    times: list[float] = []
    for path in (*folder.glob("rank_*.json"), folder / POLICY, folder / CHECKPOINT):
        with contextlib.suppress(OSError):  # the next one replaces it at this moment, or it was never written
            times.append(path.stat().st_mtime)
    return max(times, default=None)


def _rank_name(data_rank: int) -> str:
    return f"rank_{data_rank:02d}.json"


def _suffix(data_rank: int) -> str:
    """The suffix of a rank's incomplete signals. The rank's next reader finds them by it; no other
    rank writes them."""
    return f"rank_{data_rank:02d}.tmp"


def _write(run_dir: Path, name: str, signal: object, *, data_rank: int | None = None) -> None:
    suffix = None if data_rank is None else _suffix(data_rank)
    atomic.write_durably(run_dir / FOLDER / name, json_records.dumps(signal), suffix=suffix)


def _read(run_dir: Path, name: str, kind: type[Signal]) -> Signal | None:
    path = run_dir / FOLDER / name
    try:
        return json_records.loads(kind, path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise BatchError(f"{path} is not a signal file of this version: {error}; move it away") from error
