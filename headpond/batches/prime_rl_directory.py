"""prime-rl's output directory: where its trainer looks for batches, and the weights that it broadcasts there.

| format | files | a broadcast is complete with |
|---|---|---|
| prime-rl (since #3444, August 2026) | batches/step_N/rank_R.bin | .finished, after a handshake |
| prime-rl-2026-08 (559b447) | rollouts/step_N/rank_R.bin | STABLE |
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headpond.batches.manifest import Manifest
from headpond.batches.plan import FIRST_STEP, Format
from headpond.batches.signals import NOTHING, PublishedPolicy, TrainerState
from headpond.store import BlobRef, Store
from headpond.store.atomic import replacing, writing

STEP = re.compile(r"step_(\d+)")
SENDER_READY, RECEIVER_READY, FINISHED = ".sender_ready", ".receiver_ready", (".finished", "STABLE")
PUBLISHED = ("rank_*.bin", "train_rollouts.jsonl")
PRIME_RL_FIRST_STEP = 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    folder: str
    handshake: bool = False  # whether the trainer waits until its broadcast is accepted


LAYOUTS: dict[Format, Layout] = {
    "prime-rl": Layout(folder="batches", handshake=True),
    "prime-rl-2026-08": Layout(folder="rollouts"),
}


def publish_prime_rl(store: Store, manifest: Manifest, output_dir: Path) -> None:
    """Put the step's files where prime-rl reads them. Idempotent."""
    directory = step_path(manifest.plan.format, output_dir, manifest.plan.step)
    for rank in manifest.ranks:
        if rank.rollouts_jsonl:
            _publish(store, rank.rollouts_jsonl, directory / "train_rollouts.jsonl")
        _publish(store, rank.file, directory / f"rank_{rank.data_rank}.bin")


def unpublish_prime_rl(batch_format: Format, output_dir: Path, step: int) -> None:
    """Remove the files of a step that the trainer will not read again. They are links to those of
    the store."""
    directory = step_path(batch_format, output_dir, step)
    for path in (path for pattern in PUBLISHED for path in directory.glob(pattern)):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # absent, or with files of others
        directory.rmdir()


def step_path(batch_format: Format, output_dir: Path, step: int) -> Path:
    """The directory of one of our steps, under prime-rl's number."""
    return output_dir / LAYOUTS[batch_format].folder / f"step_{step - FIRST_STEP + PRIME_RL_FIRST_STEP}"


def accept_broadcasts(output_dir: Path) -> None:
    """Accept the versions that the trainer offers: it waits for that."""
    for _, path in _steps(output_dir / "broadcasts"):
        if (path / SENDER_READY).exists() and not (path / RECEIVER_READY).exists():
            with contextlib.suppress(FileNotFoundError):  # the trainer begins it again
                (path / RECEIVER_READY).touch()


def read_broadcasts(output_dir: Path) -> TrainerState | None:
    """The trainer's progress, read from its own files; None before the first broadcast.

    A broadcast of version N is complete when N steps are trained.
    """
    broadcasts = _steps(output_dir / "broadcasts")
    finished = [broadcast for broadcast in broadcasts if any((broadcast[1] / marker).exists() for marker in FINISHED)]
    if not finished:
        return None
    newest, weights = max(finished)
    # A checkpoint is written between two broadcasts: one of the newest version may be incomplete.
    saved = [step for step, _ in _steps(output_dir / "checkpoints") if step < newest]
    return TrainerState(
        acked=FIRST_STEP + newest - 1,
        checkpointed=FIRST_STEP + max(saved) - 1 if saved else NOTHING,
        policy=PublishedPolicy(version=newest, weights=str(weights)),
    )


def _steps(directory: Path) -> Iterator[tuple[int, Path]]:
    for path in directory.iterdir() if directory.is_dir() else ():
        if match := STEP.fullmatch(path.name):
            yield int(match[1]), path


def _publish(store: Store, ref: BlobRef, target: Path) -> None:
    store.require(ref)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, suffix="tmp") as temporary:
            store.export(ref.key, temporary)
