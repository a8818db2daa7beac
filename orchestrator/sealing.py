"""A step's manifest: created once, never replaced. From then on the step is delivered, whatever the ledger says."""

import logging
from pathlib import Path
from typing import Any

import orjson

from orchestrator.records import Batch
from penstock import atomic_files
from penstock.errors import RunError, RunLocked
from penstock.messages import EncodeResult
from penstock.offload import in_io_thread

logger = logging.getLogger("penstock.sealing")


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


class Sealer:
    """Writes manifests as soon as the disk takes them."""

    def __init__(self, run_dir: Path, run: str) -> None:
        self._run_dir = run_dir
        self._run = run
        self.trouble: str | None = None

    async def seal(self, batch: Batch, ranks: list[EncodeResult]) -> bool:
        """False when the disk does not take it: the step waits and is tried again."""
        path = manifest_path(self._run_dir, batch.step)
        try:
            await in_io_thread(seal, path, manifest(self._run, batch, ranks))
        except OSError as error:
            if self.trouble is None:
                logger.error("action=sealing_waits step=%d path=%s error=%s", batch.step, path, error.strerror)
            self.trouble = (
                f"the manifest of step {batch.step} cannot be written ({error.strerror}): "
                f"make room or mend the disk of {self._run_dir}; nothing is lost"
            )
            return False
        self.trouble = None
        return True


def seal(path: Path, content: bytes) -> None:
    """All or nothing, and durable. A manifest that is there already stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        atomic_files.create(path, content)
    except FileExistsError:
        # Ours, if only its directory could not be synced the last time.
        if path.read_bytes() != content:
            message = f"{path} is there already, and holds another step: does a second orchestrator drive this run?"
            raise RunLocked(message) from None
    for directory in (path.parent, path.parent.parent):
        atomic_files.sync_directory(directory)


def manifests(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Every sealed step's manifest, in order."""
    paths = sorted(run_dir.glob("batches/step_*/manifest.json"))
    return {int(path.parent.name.removeprefix("step_")): _read(path) for path in paths}


def _read(path: Path) -> dict[str, Any]:
    try:
        return orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise RunError(f"the manifest {path} is damaged ({error}): restore it from a copy") from error
