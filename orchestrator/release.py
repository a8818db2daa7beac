"""Blobs that nobody will read again go: of dropped and fenced rollouts at once, of steps when they are trained on."""

import asyncio
import logging

from orchestrator.ledger import Ledger
from orchestrator.trainer import Trainer
from penstock.batches import Manifest, read_manifest
from penstock.batches.plan import step_directory
from penstock.blobs import BlobRef, Store
from penstock.config import RunConfig
from penstock.errors import BlobError
from penstock.offload import in_io_thread

logger = logging.getLogger("penstock.release")


class Release:
    def __init__(self, config: RunConfig, ledger: Ledger, trainer: Trainer) -> None:
        self._store = Store(config.store_dir)
        self._on = config.trainer.release_on
        self._keep_steps = config.trainer.keep_steps
        self._ledger = ledger
        self._trainer = trainer
        self._one_at_a_time = asyncio.Lock()

    async def run_once(self) -> None:
        """To be called when everything so far is committed: a blob goes only after the ledger has let go of it."""
        async with self._one_at_a_time:
            unwanted, self._ledger.unwanted = self._ledger.unwanted, []
            if unwanted:
                await in_io_thread(delete, self._store, unwanted)
            state = self._trainer.state
            # A trainer that resumes reads again what it has not acknowledged, whatever it has checkpointed.
            until = min(state.checkpointed, state.acked) if self._on == "checkpointed" else state.acked
            for counter, behind in (("experts_released", 0), ("columns_released", self._keep_steps)):
                for step in range(self._ledger.number(counter), until - behind + 1):
                    await self._release(step, counter)

    async def _release(self, step: int, counter: str) -> None:
        """Whoever is stopped in the middle leaves files that the sweep finds, never a ledger that misses some."""
        experts = counter == "experts_released"
        manifest = await in_io_thread(read_manifest, self._store, step)
        if manifest is not None:
            self._ledger.count("delivered_bytes", -sum(ref.size for ref in _blobs(manifest, experts=experts)))
        self._ledger.set(counter, step + 1)
        await self._ledger.committed()
        if manifest is not None:
            await in_io_thread(release_step, self._store, manifest, experts=experts)


def release_step(store: Store, manifest: Manifest, *, experts: bool) -> None:
    """Its routed experts; or all else, of which the manifest and what people read stay."""
    delete(store, [ref.key for ref in _blobs(manifest, experts=experts) if ref.size])
    if not experts:
        store.sweep(step_directory(manifest.plan.step), named=_kept(manifest))


def _blobs(manifest: Manifest, *, experts: bool) -> list[BlobRef]:
    refs = [rollout.experts if experts else rollout.columns for rollout in manifest.plan.rollouts]
    return [ref for ref in refs if ref]


def _kept(manifest: Manifest) -> set[str]:
    directory = step_directory(manifest.plan.step)
    return {f"{directory}/manifest.json", *(rank.rollouts_jsonl.key for rank in manifest.ranks if rank.rollouts_jsonl)}


def delete(store: Store, keys: list[str]) -> None:
    for key in keys:
        try:
            store.delete(key)
        except (BlobError, OSError) as error:
            logger.warning("action=blob_not_deleted key=%s error=%s", key, error)
