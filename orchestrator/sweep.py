"""Files that nobody names: of executions that were killed, fenced or abandoned. Found by looking, every few minutes.

What the ledger or a manifest names stays, and so does everything of a rollout that is still being played.
"""

import logging
import os
from pathlib import Path

from orchestrator import schema
from orchestrator.ledger import Ledger
from orchestrator.states import UNGENERATED
from penstock import rollout_files
from penstock.batches import read_manifest
from penstock.batches.plan import step_directory
from penstock.blobs import Store
from penstock.config import RunConfig
from penstock.offload import in_io_thread

logger = logging.getLogger("penstock.sweep")

EVERY_S = 300.0  # what is swept was written in vain: rare, and no hurry
AT_ONCE = 64  # directories: some 10 ms of a thread that shares the loop's lock
STEPS = 16  # the newest ones: an encoder that comes later than that leaves its file until the step is released
DELIVERED = """
    SELECT grp || '-' || idx, json_extract(result, '$.columns.key'),
        CASE WHEN step >= ? THEN json_extract(result, '$.experts.key') END
    FROM rollouts WHERE state IN ('delivered', 'trained') AND step >= ?"""


class Sweep:
    def __init__(self, config: RunConfig, run: str, ledger: Ledger) -> None:
        self._ledger_path = config.ledger_path
        self._store = Store(config.store_dir)
        self._rollouts = rollout_files.directory(run)
        self._ledger = ledger

    async def run_once(self) -> int:
        """How many files went."""
        # First what is there, then what is named: whatever is begun in between is in neither.
        rollouts = await in_io_thread(_names, self._store.path(self._rollouts))
        await self._ledger.committed()
        groups = self._ledger.groups.values()
        spared = {rollout.id for group in groups for rollout in group.of(*UNGENERATED)}
        named = {key for group in groups for rollout in group.rollouts if rollout.result for key in rollout.result.keys}
        unreleased, delivered = (self._ledger.number(name) for name in ("columns_released", "steps_delivered"))
        steps = range(max(unreleased, delivered - STEPS), delivered)
        experts_unreleased = self._ledger.number("experts_released")
        found, of_unknown_files = await in_io_thread(self._delivered, unreleased, experts_unreleased, steps)
        spared |= of_unknown_files
        named |= found
        directories = [f"{self._rollouts}/{name}" for name in rollouts if name not in spared]
        directories += [step_directory(step) for step in steps]
        removed = 0
        for first in range(0, len(directories), AT_ONCE):
            removed += await in_io_thread(self._sweep, directories[first : first + AT_ONCE], named)
        if removed:
            logger.info("action=swept files=%d", removed)
        return removed

    def _delivered(self, unreleased: int, experts_unreleased: int, steps: range) -> tuple[set[str], set[str]]:
        """Files of delivered steps; delivered rollouts whose files a rebuilt ledger does not know."""
        with schema.reading(self._ledger_path) as connection:
            rows = connection.execute(DELIVERED, (experts_unreleased, unreleased)).fetchall()
        named = {key for _, *keys in rows for key in keys if key}
        for step in steps:
            manifest = read_manifest(self._store, step)
            ranks = manifest.ranks if manifest else ()
            named |= {ref.key for rank in ranks for ref in (rank.file, rank.rollouts_jsonl) if ref}
            named.add(f"{step_directory(step)}/manifest.json")
        return named, {rollout for rollout, *keys in rows if not any(keys)}

    def _sweep(self, directories: list[str], named: set[str]) -> int:
        return sum(len(self._store.sweep(directory, named=named)) for directory in directories)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208  names are all that is wanted, of perhaps 100,000
    except FileNotFoundError:
        return []
