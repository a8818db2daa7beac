"""Seals steps as soon as the disk takes their manifests. From then on a step is delivered, whatever the ledger says."""

import logging

from orchestrator.plan_files import batch_plan
from orchestrator.records import Batch
from penstock.batches import EncodedRank, seal_manifest
from penstock.blobs import Store
from penstock.config import RunConfig
from penstock.errors import BlobUnwritten
from penstock.offload import in_io_thread

logger = logging.getLogger("penstock.sealing")


class Sealer:
    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._store = Store(config.store_dir)
        self.trouble: str | None = None

    async def seal(self, batch: Batch, ranks: list[EncodedRank]) -> bool:
        """False when the disk does not take it: the step waits and is tried again."""
        plan = batch_plan(self._config, batch)
        try:
            await in_io_thread(seal_manifest, self._store, plan, ranks)
        except (OSError, BlobUnwritten) as error:
            if self.trouble is None:
                logger.error("action=sealing_waits step=%d error=%s", batch.step, error)
            self.trouble = (
                f"the manifest of step {batch.step} cannot be written ({error}): "
                f"make room or mend the disk of {self._store.root}; nothing is lost"
            )
            return False
        self.trouble = None
        return True
