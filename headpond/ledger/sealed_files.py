"""The files of sealed steps, each with the counter of the steps that have released files of its kind."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from headpond.batches import Manifest
from headpond.batches.manifest import manifest_key
from headpond.store import BlobRef


class SealedFile(NamedTuple):
    ref: BlobRef
    released: str  # one of `queries.RELEASED`
    of_rollout: bool


def files_of(manifest: Manifest) -> Iterator[SealedFile]:
    """Files that the manifest names, in the order in which those of a kind are deleted."""
    for rollout in manifest.plan.rollouts:
        yield SealedFile(rollout.columns, "columns_released", True)
        if rollout.experts:
            yield SealedFile(rollout.experts, "experts_released", True)
    for rank in manifest.ranks:
        yield SealedFile(rank.file, "columns_released", False)
        if rank.rollouts_jsonl:
            yield SealedFile(rank.rollouts_jsonl, "jsonl_released", False)


def unreleased_keys(manifest: Manifest, released: Mapping[str, int]) -> set[str]:
    """Keys of the files that are not released, of the manifest too."""
    step = manifest.plan.step
    own = {manifest_key(step)} if step >= released["manifests_released"] else set[str]()
    return own | {file.ref.key for file in files_of(manifest) if step >= released[file.released]}
