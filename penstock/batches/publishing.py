"""Where prime-rl's trainer looks: the files of a sealed step appear there once the manifest has named them.

Before, a step may still be formed again; so encoding jobs never write there. Publishing again changes nothing.
"""

import errno
import shutil
from pathlib import Path

from penstock.batches.manifest import Manifest
from penstock.blobs import BlobRef, Store
from penstock.blobs.parts import writing


def publish_prime_rl(store: Store, manifest: Manifest, output_dir: Path) -> None:
    """Puts the step under `output_dir/rollouts/step_N`, prime-rl's output directory."""
    directory = output_dir / "rollouts" / f"step_{manifest.plan.step}"
    one_file = manifest.plan.format == "prime-rl-2026-05"
    for rank in manifest.ranks:
        if rank.rollouts_jsonl:
            _publish(store, rank.rollouts_jsonl, directory / "train_rollouts.jsonl")
        _publish(store, rank.file, directory / ("train_rollouts.bin" if one_file else f"rank_{rank.data_rank}.bin"))


def _publish(store: Store, ref: BlobRef, target: Path) -> None:
    temporary = target.with_name(target.name + ".tmp")
    store.open(ref, verify=False)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        try:
            temporary.hardlink_to(store.path(ref.key))
        except OSError as error:
            if error.errno not in (
                errno.EXDEV,
                errno.EPERM,
                errno.EOPNOTSUPP,
            ):  # another file system, or one without links
                raise
            shutil.copyfile(store.path(ref.key), temporary)
        temporary.replace(target)
        temporary.unlink(missing_ok=True)  # a rename onto the same file leaves both names
