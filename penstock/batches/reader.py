"""What a trainer uses: batches as they are sealed, and its words to the orchestrator. Needs files only, no Redis.

A sealed step is delivered byte for byte the same, however often a trainer comes back to it.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path

from penstock.batches.batch import Batch
from penstock.batches.manifest import Manifest, manifest_path, read_manifest
from penstock.batches.plan import FIRST_STEP
from penstock.batches.signals import (
    NOTHING,
    Checkpoint,
    PublishedPolicy,
    RankProgress,
    RunStatus,
    read_progress,
    read_status,
    write_checkpoint,
    write_policy,
    write_progress,
)
from penstock.blobs import Store, open_store
from penstock.errors import BatchError, ConfigError, Stalled

# How often a waiting reader looks: soon for a batch that is about to come, at most once a second for one that is not.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0


class BatchReader:
    def __init__(
        self,
        run_dir: str | PathLike[str],
        *,
        data_rank: int,
        data_ranks: int,
        resume_step: int | None = None,
        store: str | None = None,
        timeout_s: float = 3600.0,
    ) -> None:
        """Delivers the steps after `resume_step`, the step of the checkpoint that the trainer comes from; all without.

        `store` is the run's setting of that name, where it has one.
        """
        if not 0 <= data_rank < data_ranks:
            raise ConfigError(f"data_rank {data_rank} is not one of the {data_ranks} data ranks, numbered from 0")
        resumed = NOTHING if resume_step is None else resume_step
        if resumed < NOTHING:
            raise ConfigError(f"resume_step {resumed} is no step: the first one is {FIRST_STEP}")
        self._run_dir = Path(run_dir)
        self._store = open_store(store) if store else Store(self._run_dir / "store")
        self._timeout_s = timeout_s
        before = read_progress(self._run_dir, data_rank)
        self._delivered = resumed
        self._progress = RankProgress(
            data_rank=data_rank,
            data_ranks=data_ranks,
            epoch=before.epoch + 1 if before else 1,
            resume_step=resumed,
            acked=resumed,
        )
        write_progress(self._run_dir, self._progress)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Waits for the next step. Stalled can be caught and the call repeated: nothing is skipped."""
        manifest = self._wait(self._delivered + 1)
        rules, mine = manifest.plan.rules, self._progress
        if manifest.plan.format != "native":
            raise BatchError(f'this run writes format = "{manifest.plan.format}": read its files with prime-rl')
        if rules.data_ranks != mine.data_ranks:
            raise BatchError(
                f"step {manifest.plan.step} was sealed for {rules.data_ranks} data ranks, this reader has "
                f"{mine.data_ranks}: start the trainer with as many as the run's setting data_ranks"
            )
        batch = Batch(self._store, manifest, mine.data_rank)
        self._delivered = batch.step
        return batch

    def ack(self, step: int) -> None:
        """This rank has trained on the steps up to `step`. A step is trained when every rank said so."""
        if step > self._delivered:
            raise BatchError(f"ack({step}): this reader has delivered steps up to {self._delivered} only")
        self._progress = replace(self._progress, acked=max(step, self._progress.acked))
        write_progress(self._run_dir, self._progress)

    def publish_policy(self, version: int, weights: str | PathLike[str] | None = None) -> None:
        """Called by one rank: the engines have, or can load, policy `version`."""
        write_policy(self._run_dir, PublishedPolicy(version=version, weights=fspath(weights) if weights else None))

    def checkpointed(self, step: int) -> None:
        """The trainer can come back to `step`: it will never ask for steps up to this one again, their blobs may go."""
        if step > self._progress.acked:
            raise BatchError(f"checkpointed({step}): this rank acknowledged steps up to {self._progress.acked} only")
        write_checkpoint(self._run_dir, Checkpoint(step=step))

    def _wait(self, step: int) -> Manifest:
        deadline, pause_s = time.monotonic() + self._timeout_s, FIRST_PAUSE_S
        first_status = read_status(self._run_dir)
        while (manifest := read_manifest(self._store, step)) is None:
            status = read_status(self._run_dir)
            if status and status.ended and status.last_step < step:
                raise StopIteration
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Stalled(self._why(step, first_status, status))
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return manifest

    def _why(self, step: int, before: RunStatus | None, now: RunStatus | None) -> str:
        waited = f"no {manifest_path(self._store, step)} in {self._timeout_s:g} s"
        if now is None:
            return f"{waited}, and no orchestrator has written to {self._run_dir}: is it the directory of a run?"
        silent = " (it has said nothing else since the wait began: does it still run?)" if now == before else ""
        return f"{waited}; the orchestrator says: {now.why}{silent}"
