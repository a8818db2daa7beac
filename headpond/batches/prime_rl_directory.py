"""prime-rl's output directory: where its trainer looks for batches, and the weights that it broadcasts there.

| format | files | its first step | a broadcast is complete with |
|---|---|---|---|
| prime-rl (since #3444, August 2026) | batches/step_N/rank_R.bin | 1 | .finished, after a handshake |
| prime-rl-2026-08 (559b447) | rollouts/step_N/rank_R.bin | 1 | STABLE |
| prime-rl-2026-05 (8e97806) | run_default/rollouts/step_N/train_rollouts.bin | 0 | STABLE |
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headpond.batches.manifest import Manifest
from headpond.batches.plan import FIRST_STEP, Format
from headpond.batches.signals import NOTHING, PublishedPolicy, TrainerState
from headpond.store import BlobRef, Store
from headpond.store.atomic import replacing, writing

RUN = "run_default"  # the trainer of May 2026 reads every directory run_* that has control/orch.toml
STEP = re.compile(r"step_(\d+)")
SENDER_READY, RECEIVER_READY, FINISHED = ".sender_ready", ".receiver_ready", (".finished", "STABLE")
PUBLISHED = ("rank_*.bin", "train_rollouts.bin", "train_rollouts.jsonl")


@dataclass(frozen=True, kw_only=True)
class Layout:
    folder: str
    first_step: int
    one_file: bool = False
    run: str = ""
    """directory of the run below the output directory"""
    handshake: bool = False
    """whether the trainer waits until its broadcast is accepted"""


LAYOUTS: dict[Format, Layout] = {
    "prime-rl": Layout(folder="batches", first_step=1, handshake=True),
    "prime-rl-2026-08": Layout(folder="rollouts", first_step=1),
    "prime-rl-2026-05": Layout(folder="rollouts", first_step=0, one_file=True, run=RUN),
}


def publish_prime_rl(store: Store, manifest: Manifest, output_dir: Path) -> None:
    """Put the step's files where prime-rl reads them. Idempotent."""
    layout, directory = LAYOUTS[manifest.plan.format], step_path(manifest.plan.format, output_dir, manifest.plan.step)
    if layout.run:
        _write_orchestrator_settings(output_dir / layout.run, manifest.plan.envs)
    for rank in manifest.ranks:
        if rank.rollouts_jsonl:
            _publish(store, rank.rollouts_jsonl, directory / "train_rollouts.jsonl")
        name = "train_rollouts.bin" if layout.one_file else f"rank_{rank.data_rank}.bin"
        _publish(store, rank.file, directory / name)


def unpublish_prime_rl(batch_format: Format, output_dir: Path, step: int) -> None:
    """Remove the files of a step that the trainer will not read again: they are links to those of the store."""
    directory = step_path(batch_format, output_dir, step)
    for path in (path for pattern in PUBLISHED for path in directory.glob(pattern)):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # absent, or with files of others
        directory.rmdir()


def step_path(batch_format: Format, output_dir: Path, step: int) -> Path:
    """Of a step of ours, by prime-rl's number."""
    layout = LAYOUTS[batch_format]
    return output_dir / layout.run / layout.folder / f"step_{step - FIRST_STEP + layout.first_step}"


def accept_broadcasts(batch_format: Format, output_dir: Path) -> None:
    """Accept the versions that the trainer offers, because it waits for that."""
    for _, path in _steps(output_dir / LAYOUTS[batch_format].run / "broadcasts"):
        if (path / SENDER_READY).exists() and not (path / RECEIVER_READY).exists():
            with contextlib.suppress(FileNotFoundError):  # the trainer begins it again
                (path / RECEIVER_READY).touch()


def read_broadcasts(batch_format: Format, output_dir: Path) -> TrainerState | None:
    """The trainer's progress by its own files: a broadcast of version N is complete when N steps are trained. None
    before the first."""
    directory = output_dir / LAYOUTS[batch_format].run
    broadcasts = _steps(directory / "broadcasts")
    finished = [each for each in broadcasts if any((each[1] / marker).exists() for marker in FINISHED)]
    if not finished:
        return None
    newest, weights = max(finished)
    # A checkpoint is written between two broadcasts: one of the newest version may be incomplete.
    saved = [step for step, _ in _steps(directory / "checkpoints") if step < newest]
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


def _write_orchestrator_settings(run: Path, environments: Sequence[str]) -> None:
    """What the trainer reads of its orchestrator's settings; those that are there stay. JSON strings are TOML's."""
    target = run / "control" / "orch.toml"
    if target.exists():
        return
    tables = "".join(f"\n[[env]]\nid = {json.dumps(name)}\n" for name in environments)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, suffix="tmp") as temporary:
            temporary.write_text(f'[model]\nname = "policy"\n{tables}\n[sampling]\ntemperature = 1.0\n')
