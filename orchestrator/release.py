"""Deletes blobs that will not be read again: `Releaser` those that the ledger releases, `Sweeper` unnamed files."""

import asyncio
import logging

from orchestrator.housekeeping import Reported, delete
from orchestrator.ledger.ledger import Ledger
from orchestrator.trainer import Trainer
from penstock import ids
from penstock.batches import Manifest, read_manifest
from penstock.batches.plan import step_directory
from penstock.config import RunConfig
from penstock.ledger import queries, schema
from penstock.ledger.states import UNGENERATED
from penstock.runtime.offload import in_io_thread
from penstock.store import BlobRef, Store, open_store

logger = logging.getLogger("penstock.release")

SWEEP_EVERY_S = 300.0  # unnamed files are rare and can wait
SWEPT_AT_ONCE = 64  # directories: about 10 ms of a thread that shares the GIL with the loop
SWEPT_STEPS = 16  # the newest ones; the file of an encoder that is later than that stays until its step is released


class Releaser:
    """Deletes blobs of dropped and fenced rollouts at once, blobs of a step when it is trained on."""

    def __init__(self, config: RunConfig, ledger: Ledger, trainer: Trainer) -> None:
        self._store = open_store(config.store_url)
        self._on = config.trainer.release_on
        self._keep_steps = config.trainer.keep_steps
        self._ledger = ledger
        self._trainer = trainer
        self._lock = asyncio.Lock()
        self._releasing = Reported("delete the files of trained steps")

    @property
    def trouble(self) -> str | None:
        return self._releasing.trouble

    async def run_once(self) -> None:
        """Call after a commit: a blob is deleted only when the ledger no longer names it."""
        async with self._lock:
            unwanted, self._ledger.unwanted_blobs = self._ledger.unwanted_blobs, []
            if unwanted:
                await in_io_thread(delete, self._store, unwanted)
            state = self._trainer.state
            # A trainer that resumes reads every step again that it has not acknowledged, even if checkpointed.
            until = min(state.checkpointed, state.acked) if self._on == "checkpointed" else state.acked
            with self._releasing:
                for counter, behind in (("experts_released", 0), ("columns_released", self._keep_steps)):
                    for step in range(self._ledger.number(counter), until - behind + 1):
                        await self._release(step, counter)

    async def _release(self, step: int, counter: str) -> None:
        """The ledger first: after a kill, the sweep finds the files that are left."""
        experts = counter == "experts_released"
        manifest = await in_io_thread(read_manifest, self._store, step)
        if manifest is not None:
            self._ledger.increment("delivered_bytes", -sum(ref.size for ref in _blobs(manifest, experts=experts)))
        self._ledger.set(counter, step + 1)
        await self._ledger.committed()
        if manifest is not None:
            await in_io_thread(release_step, self._store, manifest, experts=experts)


def release_step(store: Store, manifest: Manifest, *, experts: bool) -> None:
    """Delete its routed experts, or everything else except the manifest and rollouts.jsonl."""
    delete(store, [ref.key for ref in _blobs(manifest, experts=experts) if ref.size])
    if not experts:
        store.sweep(step_directory(manifest.plan.step), named=_kept(manifest))


def _blobs(manifest: Manifest, *, experts: bool) -> list[BlobRef]:
    refs = [rollout.experts if experts else rollout.columns for rollout in manifest.plan.rollouts]
    return [ref for ref in refs if ref]


def _kept(manifest: Manifest) -> set[str]:
    directory = step_directory(manifest.plan.step)
    return {f"{directory}/manifest.json", *(rank.rollouts_jsonl.key for rank in manifest.ranks if rank.rollouts_jsonl)}


class Sweeper:
    """Deletes files of settled rollouts and delivered steps that neither ledger nor manifest names."""

    def __init__(self, config: RunConfig, run: str, ledger: Ledger) -> None:
        self._ledger_path = config.ledger_path
        self._store = open_store(config.store_url)
        self._run = run
        self._rollouts = ids.run_directory(run)
        self._ledger = ledger
        self._lock = asyncio.Lock()
        self._sweeping = Reported("sweep the store")

    @property
    def trouble(self) -> str | None:
        return self._sweeping.trouble

    async def run_once(self) -> int:
        """The number of deleted files; 0 if they cannot be listed at present."""
        async with self._lock:
            with self._sweeping:
                return await self._run_once()
        return 0

    async def _run_once(self) -> int:
        # In this order no file in use is unnamed: a rollout that begins after the listing is not listed; a step that is
        # delivered after the names of open groups are taken is among them, one that was delivered before is committed.
        rollouts = await in_io_thread(self._store.names, self._rollouts)
        groups = self._ledger.groups.values()
        spared = {rollout.id for group in groups for rollout in group.of(*UNGENERATED)}
        named = {key for group in groups for rollout in group.rollouts if rollout.result for key in rollout.result.keys}
        unreleased, delivered = (self._ledger.number(name) for name in ("columns_released", "steps_delivered"))
        steps = range(max(unreleased, delivered - SWEPT_STEPS), delivered)
        experts_unreleased = self._ledger.number("experts_released")
        await self._ledger.committed()
        of_delivered, unknown = await in_io_thread(self._delivered, unreleased, experts_unreleased, steps)
        spared |= unknown
        named |= of_delivered
        directories = [ids.rollout_directory(self._run, name) for name in rollouts if name not in spared]
        directories += [step_directory(step) for step in steps]
        removed = 0
        for first in range(0, len(directories), SWEPT_AT_ONCE):
            removed += await in_io_thread(self._sweep, directories[first : first + SWEPT_AT_ONCE], named)
        if removed:
            logger.info("action=swept files=%d", removed)
        return removed

    def _delivered(self, unreleased: int, experts_unreleased: int, steps: range) -> tuple[set[str], set[str]]:
        """Files of delivered steps, and delivered rollouts whose files a rebuilt ledger does not know."""
        with schema.reading(self._ledger_path) as connection:
            rows = queries.delivered_files(connection, columns_from=unreleased, experts_from=experts_unreleased)
        named = {key for _, *keys in rows for key in keys if key}
        for step in steps:
            manifest = read_manifest(self._store, step)
            ranks = manifest.ranks if manifest else ()
            named |= {ref.key for rank in ranks for ref in (rank.file, rank.rollouts_jsonl) if ref}
            named.add(f"{step_directory(step)}/manifest.json")
        return named, {rollout for rollout, *keys in rows if not any(keys)}

    def _sweep(self, directories: list[str], named: set[str]) -> int:
        removed = 0
        for directory in directories:
            with Reported(f"sweep {directory}"):
                removed += len(self._store.sweep(directory, named=named))
        return removed
