"""A step's manifest: created once, never replaced. From then on the step is delivered, whatever the ledger says."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import orjson

from orchestrator.records import Batch
from penstock.errors import RunError
from penstock.messages import EncodeResult


def manifest_path(run_dir: Path, step: int) -> Path:
    return run_dir / "batches" / f"step_{step:06d}" / "manifest.json"


def manifest(run: str, batch: Batch, ranks: list[EncodeResult]) -> bytes:
    return orjson.dumps(
        {
            "run": run,
            "step": batch.step,
            "formation": batch.formation,
            "groups": {
                group.id: {
                    "ordinal": group.ordinal,
                    "environment": group.environment,
                    "example": group.example,
                    "size": len(group.rollouts),
                }
                for group in batch.groups
            },
            "rollouts": {
                rollout.id: {"group": rollout.group, "advantage": rollout.advantage} for rollout in batch.rollouts()
            },
            "ranks": [rank.model_dump(mode="json") for rank in ranks],
            "totals": {
                "rollouts": sum(1 for _ in batch.rollouts()),
                "groups": len(batch.groups),
                "samples": sum(rank.samples for rank in ranks),
                "loss_tokens": sum(rank.loss_tokens for rank in ranks),
            },
        },
        option=orjson.OPT_INDENT_2,
    )


def seal(path: Path, content: bytes) -> None:
    """All or nothing, and durable. A manifest that is there already stays: FileExistsError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".manifest-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
    for directory in (path.parent, path.parent.parent):
        _sync_directory(directory)


def manifests(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Every sealed step's manifest, in order."""
    paths = sorted(run_dir.glob("batches/step_*/manifest.json"))
    return {int(path.parent.name.removeprefix("step_")): _read(path) for path in paths}


def _read(path: Path) -> dict[str, Any]:
    try:
        return orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise RunError(f"the manifest {path} is damaged ({error}): restore it from a copy") from error


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
