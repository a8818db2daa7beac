"""Writes the manifests of encoded steps. A step with a manifest is delivered; the ledger may record it later."""

import logging

from orchestrator.inputs import batch_plan
from orchestrator.ledger.records import BatchRecord
from penstock.batches import EncodedRank, Manifest, read_manifest, seal_manifest
from penstock.batches.prime_rl_directory import publish_prime_rl
from penstock.config import RunConfig
from penstock.errors import BlobError, BlobUnwritten
from penstock.runtime.offload import in_io_thread
from penstock.store import open_store

logger = logging.getLogger("penstock.sealing")


class Sealer:
    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._store = open_store(config.store_url)
        self.trouble: str | None = None
        """why a step cannot be sealed at present"""
        self.visible: int | None = None
        """the step whose manifest a trainer may see although sealing it has failed: it must not be formed again"""

    async def seal(self, batch: BatchRecord, ranks: list[EncodedRank]) -> bool:
        """False when the manifest cannot be written or synced: the step waits and is tried again."""
        try:
            await in_io_thread(self._seal, batch, ranks)
        except (OSError, BlobUnwritten) as error:
            self.visible = batch.step if await in_io_thread(self._may_be_visible, batch.step) else None
            if self.trouble is None:
                logger.error("action=sealing_waits step=%d error=%s", batch.step, error)
            self.trouble = (
                f"the manifest of step {batch.step} cannot be written ({error}): "
                f"free space in the store {self._store}, or repair it; nothing is lost"
            )
            return False
        self.trouble = self.visible = None
        return True

    def _may_be_visible(self, step: int) -> bool:
        """True also if the disk does not tell."""
        try:
            return read_manifest(self._store, step) is not None
        except (OSError, BlobError):
            return True

    def _seal(self, batch: BatchRecord, ranks: list[EncodedRank]) -> None:
        """In a thread, the plan included: 12 ms for 2,048 rollouts, whose records do not change meanwhile."""
        plan = batch_plan(self._config, batch)
        self.publish(seal_manifest(self._store, plan, ranks, estimator_state=batch.estimator_state))

    def publish(self, manifest: Manifest) -> None:
        """For a format of prime-rl: put the files where its trainer expects them. Idempotent."""
        if manifest.plan.format != "native":
            publish_prime_rl(self._store, manifest, self._config.prime_rl_dir)
