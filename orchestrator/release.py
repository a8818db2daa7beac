"""Deletes blobs that will not be read again: `Releaser` those that the ledger releases, `Sweeper` unnamed files."""

import asyncio
import logging
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from headpond import ids
from headpond.batches import Manifest, TrainerState, read_manifest
from headpond.batches.manifest import NAME, manifest_key
from headpond.batches.plan import Format, step_directory
from headpond.batches.prime_rl_directory import unpublish_prime_rl
from headpond.config import RunConfig
from headpond.config.run import Trainer as TrainerSettings
from headpond.event_loop.offload import in_io_thread
from headpond.ledger import queries, schema
from headpond.ledger.sealed_files import files_of, unreleased_keys
from headpond.ledger.states import UNGENERATED
from headpond.orchestrator.duties.housekeeping import Reported, Troubles, delete
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import GroupRecord
from headpond.orchestrator.trainer import Trainer, last_released
from headpond.store import Store, open_store

logger = logging.getLogger("headpond.release")

SWEEP_EVERY_S = 300.0  # unnamed files are rare and can wait
SWEPT_AT_ONCE = 64  # directories: about 10 ms of a thread that shares the GIL with the loop
HELD_STEPS = 20  # delivered and not released: most trainers checkpoint more often
SWEPT_STEPS = 16  # the newest ones; the file of an encoder that is later than that stays until its step is released


class Releaser:
    """Deletes blobs of dropped and fenced rollouts at once, blobs of a step when it is trained on."""

    def __init__(self, config: RunConfig, ledger: Ledger, trainer: Trainer, troubles: Troubles | None = None) -> None:
        self._store = open_store(config.store_url)
        self._settings = config.trainer
        self._ledger = ledger
        self._trainer = trainer
        self._published_in = config.prime_rl_dir
        self._lock = asyncio.Lock()
        self.releasing = Reported("delete the files of trained steps", troubles=troubles)
        (troubles or Troubles()).notes.add(self.notes)

    def notes(self) -> list[str]:
        """What keeps many delivered steps in the store, although nothing waits for it."""
        held_steps = self._ledger.state.steps_delivered - 1 - self._trainer.last_released
        held, because = self._ledger.state.delivered_bytes, self._trainer.holds_because
        if held_steps < HELD_STEPS or not held or because is None:
            return []
        return [f"the store keeps {held / 1e9:.1f} GB of delivered steps: {because}"]

    async def run_once(self) -> None:
        """A blob is deleted when a commit has everything that made it unwanted: after a kill before that, the ledger
        would still name it."""
        async with self._lock:
            unwanted, self._ledger.unwanted_blobs = self._ledger.unwanted_blobs, []
            if unwanted:
                await self._ledger.committed()
                await in_io_thread(delete, self._store, unwanted)
            with self.releasing:
                for counter, first_kept in releasable(self._settings, self._trainer.state).items():
                    for step in range(self._ledger.state.released[counter], first_kept):
                        await self._release(step, counter)

    async def _release(self, step: int, counter: str) -> None:
        """The ledger first: after a kill, the sweep finds the files that are left."""
        manifest = await in_io_thread(read_manifest, self._store, step)
        if manifest is not None:
            files = [file for file in files_of(manifest) if file.released == counter and file.of_rollout]
            self._ledger.state.delivered_bytes -= sum(file.ref.size for file in files)
        self._ledger.state.released |= {counter: step + 1}
        await self._ledger.committed()
        if manifest is not None:
            await in_io_thread(release_step, self._store, manifest, counter, dict(self._ledger.state.released))
            if counter == "columns_released" and manifest.plan.format != "native":
                await in_io_thread(unpublish_prime_rl, manifest.plan.format, self._published_in, step)


def releasable(settings: TrainerSettings, state: TrainerState) -> dict[str, int]:
    """Kind of `RELEASED` -> the first step whose files of that kind are kept."""
    until = last_released(settings, state)
    kept = {
        "experts_released": 0,
        "columns_released": settings.keep_steps,
        "jsonl_released": settings.keep_jsonl_steps,
    }
    if settings.keep_manifests != "all":  # last: the other kinds are found by it
        kept["manifests_released"] = max(settings.keep_manifests, *kept.values())
    return {counter: max(0, until - steps + 1) for counter, steps in kept.items()}


def release_step(store: Store, manifest: Manifest, counter: str, released: Mapping[str, int]) -> None:
    """Delete the files of the kind that `counter` counts, and whatever is not named in the step's directory."""
    delete(store, [file.ref.key for file in files_of(manifest) if file.released == counter and file.ref.size])
    store.sweep(step_directory(manifest.plan.step), named=unreleased_keys(manifest, released))


class SomeRollouts(NamedTuple):
    """Names of directories in the store, and what the open records say of them."""

    settled: list[str]  # of open groups, generated or dropped
    closed: list[str]  # of no open group
    named: set[str]  # files of settled ones that stay


def sort_out(names: Iterable[str], groups: Mapping[str, GroupRecord]) -> SomeRollouts:
    """Leaves out rollouts that are not generated: an execution may be writing."""
    found = SomeRollouts([], [], set())
    for name in names:
        id = ids.RolloutId.match(name)
        group = groups.get(id.group) if id else None
        if id is None or group is None or id.number >= len(group.rollouts):
            found.closed.append(name)
        elif (rollout := group.rollouts[id.number]).state not in UNGENERATED:
            found.settled.append(name)
            found.named.update(rollout.result.keys if rollout.result else ())
    return found


def closed_files(
    connection: sqlite3.Connection, run: str, closed: Collection[str], released: Mapping[str, int]
) -> set[str]:
    """The files of delivered rollouts among `closed` that are not released."""
    named = set[str]()
    groups = {id.group for id in map(ids.RolloutId.match, closed) if id}
    for _rollout, step, columns, experts in queries.delivered_files(connection, run, groups):
        if step >= released["columns_released"]:
            named.update(filter(None, (columns, experts if step >= released["experts_released"] else None)))
    return named


class Sweeper:
    """Deletes files of settled rollouts and delivered steps that neither ledger nor manifest names.

    A few directories at a time: the loop looks up their open records, a thread the archive and the files.
    """

    def __init__(self, config: RunConfig, run: str, ledger: Ledger, troubles: Troubles | None = None) -> None:
        self._ledger_path = config.ledger_path
        self._store = open_store(config.store_url)
        self._format: Format = config.batch.format
        self._published_in = config.prime_rl_dir
        self._run = run
        self._rollouts = ids.run_directory(run)
        self._ledger = ledger
        self._lock = asyncio.Lock()
        self.sweeping = Reported("sweep the store", troubles=troubles)

    async def run_once(self) -> int:
        """The number of deleted files; 0 if they cannot be listed at present."""
        async with self._lock:
            with self.sweeping:
                return await self._run_once()
        return 0

    async def _run_once(self) -> int:
        # The rollouts of a group follow each other, so that few groups are looked up at once.
        rollouts = sorted(await in_io_thread(self._store.names, self._rollouts))
        removed = 0
        for first in range(0, len(rollouts), SWEPT_AT_ONCE):
            # In this order no file in use is unnamed: a rollout that begins after the listing is not listed; one that
            # is delivered after its open record was looked up is named by that; one that was delivered before is
            # committed.
            some = rollouts[first : first + SWEPT_AT_ONCE]
            found = sort_out(some, self._ledger.groups)
            released = dict(self._ledger.state.released)
            await self._ledger.committed()
            removed += await in_io_thread(self._sweep_rollouts, found, released)
        released, delivered = dict(self._ledger.state.released), self._ledger.state.steps_delivered
        unreleased = released["columns_released"]
        await self._ledger.committed()
        # A kill or an error may have left files of a released step, and a late encoder may add one.
        newest = range(max(unreleased, delivered - SWEPT_STEPS), delivered)
        for step in [*range(max(0, unreleased - SWEPT_STEPS), unreleased), *newest]:
            removed += await in_io_thread(self._sweep_step, step, released)
        if removed:
            logger.info("action=swept files=%d", removed)
        return removed

    def _sweep_rollouts(self, found: SomeRollouts, released: Mapping[str, int]) -> int:
        named = found.named
        if found.closed:
            with schema.reading(self._ledger_path) as connection:
                named = named | closed_files(connection, self._run, found.closed, released)
        swept = [*found.settled, *found.closed]
        return sum(self._sweep(ids.rollout_directory(self._run, name), named) for name in swept)

    def _sweep_step(self, step: int, released: Mapping[str, int]) -> int:
        if step < released["columns_released"]:
            if self._format != "native":
                unpublish_prime_rl(self._format, self._published_in, step)
            # Almost all have nothing but their manifest, which is not read then.
            if step >= released["manifests_released"] and {*self._store.names(step_directory(step))} <= {NAME}:
                return 0
        manifest = read_manifest(self._store, step)
        named = unreleased_keys(manifest, released) if manifest else {manifest_key(step)}
        return self._sweep(step_directory(step), named)

    def _sweep(self, directory: str, named: set[str]) -> int:
        with Reported(f"sweep {directory}"):
            return len(self._store.sweep(directory, named=named))
        return 0
