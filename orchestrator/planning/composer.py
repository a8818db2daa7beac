"""From admitted groups to sealed steps, one open step at a time.

`Composer` selects the groups, which are not split, and drops stale rollouts; `Sealer` writes the manifest. A step with
a manifest is delivered; the ledger may record it later.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable

from headpond.batches import EncodedRank, Manifest, read_manifest, seal_manifest
from headpond.batches.plan import FIRST_STEP
from headpond.batches.prime_rl_directory import publish_prime_rl
from headpond.batches.signals import StartVersion, write_start
from headpond.config import RunConfig
from headpond.engines.replicas.control import START_VERSION
from headpond.errors import BlobError, BlobUnwritten, RunError, sentence
from headpond.event_loop.offload import in_io_thread
from headpond.ledger.states import GroupState, JobState, RolloutState
from headpond.orchestrator.duties.housekeeping import Reported, Troubles
from headpond.orchestrator.duties.slices import in_slices
from headpond.orchestrator.endings.staleness import Staleness
from headpond.orchestrator.examples.choice import Examples
from headpond.orchestrator.exchange.inputs import batch_plan
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.ledger.rows import BatchRecord, GroupRecord, RolloutRecord
from headpond.orchestrator.pipeline import Pipeline
from headpond.orchestrator.planning.quotas import in_groups, leftover, quantity, quotas
from headpond.orchestrator.trainer import Trainer
from headpond.store import open_store

logger = logging.getLogger("headpond.composer")

CHECKED_AT_ONCE = 128  # groups to check for staleness: about 1 ms


class Composer:
    def __init__(self, config: RunConfig, ledger: Ledger, trainer: Trainer, pipeline: Pipeline) -> None:
        self._config = config
        self._ledger = ledger
        self._trainer = trainer
        self._pipeline = pipeline
        self._staleness = Staleness(config, ledger)
        self._examples = Examples(config, ledger)

    def compose(self) -> BatchRecord | None:
        """Compose the next step if enough is admitted, and add the jobs that follow, in one transaction."""
        step = self._ledger.state.steps_delivered
        if self._ledger.batches or step >= self._config.steps or not self._trainer.may_seal(step):
            return None
        self._check(self._unchecked())
        groups = self._select(step)
        if groups is None:
            return None
        batch = self._ledger.compose(step, groups, final=not self._pipeline.has_batch_phase)
        self._ledger.state.composed_step = step
        self._ledger.state.composed_version = self._ledger.state.policy_version
        self._pipeline.begin(batch)
        return batch

    def resume(self) -> None:
        """Begin a new count of failed formations, and form an open step again whose batch phase has failed or
        was cancelled."""
        self._ledger.state.failed_formations = 0
        for batch in list(self._ledger.batches.values()):
            job = self._ledger.jobs.get(batch.batch_phase_id)
            if not batch.advantages and (job is None or job.state is JobState.DEAD):
                self.form_again(batch, "it has no advantages")

    def encoded(self, *, visible: int | None = None) -> tuple[BatchRecord, list[EncodedRank]] | None:
        """The open step if all its ranks are encoded. A step that cannot be encoded or became stale is formed again,
        unless it is `visible`: a trainer may be reading its manifest."""
        for batch in self._ledger.batches.values():
            if not batch.advantages:
                return None
            jobs, results = self._pipeline.encode.jobs(batch), self._pipeline.encode.results(batch)
            if len(jobs) < self._config.batch.data_ranks:
                self.form_again(batch, "an encoding job was cancelled")
                return None
            unreadable = {rollout for result in results for rollout in result.unreadable}
            if unreadable:
                self.form_again(batch, f"{len(unreadable)} rollouts cannot be read", unreadable)
                return None
            if dead := [job for job in jobs if job.state is JobState.DEAD]:
                self._count_formation(batch, dead[0].error)
                return None
            ranks = [result.rank for result in results if result.rank]
            if len(ranks) < len(jobs):
                return None
            versions = {rollout.result.version_first for rollout in batch.rollouts() if rollout.result}
            if batch.step == visible or not any(map(self._staleness.drops, versions)):
                return batch, ranks
            self.form_again(batch, "a rollout became stale while it was encoded")
            return None
        return None

    def _count_formation(self, batch: BatchRecord, error: str | None) -> None:
        self.form_again(batch, error or "an encoding job died")
        self._ledger.state.failed_formations += 1
        failed = self._ledger.state.failed_formations
        if failed >= self._config.recovery.max_formations:
            raise RunError(
                f"step {batch.step} could not be encoded in {failed} formations, the last error: "
                f"{sentence(str(error))} Fix the cause and run the same command again; nothing is lost"
            )

    def form_again(self, batch: BatchRecord, why: str, unreadable: Collection[str] = ()) -> None:
        """Form the step without `unreadable` rollouts: their blobs were damaged or deleted after the filters."""
        logger.warning("action=step_formed_again step=%d unreadable=%s formation=%d why=%s", batch.step,
                       ",".join(sorted(unreadable)), batch.formation, why)  # fmt: skip
        self._ledger.event(f"step {batch.step}", "formed_again", why)
        self._pipeline.release_inputs(batch)
        self._ledger.dissolve(batch)
        for group in batch.groups if unreadable else ():
            self._drop_from(group, "blob_corrupt", lambda rollout: rollout.id in unreadable)

    async def drop_stale(self) -> None:
        """Drop the stale rollouts of all admitted groups, in slices: call before `compose`, which checks the groups
        that were admitted between the slices."""
        async for some in in_slices(self._unchecked(), CHECKED_AT_ONCE):
            self._check(some)

    def _unchecked(self) -> list[GroupRecord]:
        """Admitted groups that were not checked against the policy version: each is checked once per version."""
        version = self._ledger.state.policy_version
        return [group for group in self._ledger.groups_in(GroupState.ADMITTED) if group.checked_version != version]

    def _check(self, groups: Iterable[GroupRecord]) -> None:
        for group in groups:
            group.checked_version = self._ledger.state.policy_version
            self._drop_from(group, "stale", self._staleness.drops_rollout)

    def _drop_from(self, group: GroupRecord, reason: str, drops: Callable[[RolloutRecord], bool]) -> None:
        for rollout in filter(drops, group.of(RolloutState.ADMITTED)):
            self._ledger.drop(rollout, reason)
        if not group.of(RolloutState.ADMITTED):
            self._ledger.enter(group, GroupState.CLOSED)

    def _select(self, step: int) -> list[GroupRecord] | None:
        """The step's groups, or None if an environment does not have enough yet."""
        taken: list[GroupRecord] = []
        parts = quotas(self._config, step, leftover(self._config, self._ledger, self._examples))
        unit = self._config.batch.unit
        if any(self._ledger.admitted[name, unit] < quota for name, quota in parts.items()):
            return None  # on most wake-ups, without a look at the groups
        if sum(parts.values()) < self._config.batch.size:
            return None  # the data has ended
        for name, quota in parts.items():
            part = self._select_from(name, quota)
            if part is None:
                return None
            taken += part
        return sorted(taken, key=lambda group: group.ordinal)

    def _select_from(self, environment: str, quota: int) -> list[GroupRecord] | None:
        open_groups = (
            group
            for group in self._ledger.groups.values()
            if group.environment == environment and group.state != GroupState.BATCHED
        )
        window = self._window(environment, quota)
        taken: list[GroupRecord] = []
        held, awaited = 0, False
        for place, group in enumerate(open_groups):
            # Look beyond the window only when every group in it is admitted: partial groups may leave it short.
            if held >= quota or (place >= window and awaited):
                break
            if group.state == GroupState.ADMITTED:
                taken.append(group)
                held += quantity(self._config, group)
            else:
                awaited = True
        return taken if held >= quota else None

    def _window(self, environment: str, quota: int) -> float:
        """The number of open groups, in planned order, that a step may choose from."""
        groups = in_groups(self._config, self._ledger, environment, quota)
        if self._config.batch.order == "completion" or groups is None:
            return math.inf
        return math.ceil(self._config.batch.window * math.ceil(groups))


class Sealer:
    def __init__(self, config: RunConfig, troubles: Troubles | None = None) -> None:
        self._config = config
        self.store = open_store(config.store_url)
        self.sealing = Reported(
            f"write a manifest to the store {self.store}",
            "free space or repair it; nothing is lost",
            errors=(OSError, BlobUnwritten),
            troubles=troubles,
        )
        # the step whose manifest a trainer may see although sealing it has failed: it
        # must not be formed again
        self.visible: int | None = None

    async def seal(self, batch: BatchRecord, ranks: list[EncodedRank], *, start_version: int = START_VERSION) -> bool:
        """False when the manifest cannot be written or synced: the step waits and is tried again."""
        with self.sealing:
            await in_io_thread(self._seal, batch, ranks, start_version)
            self.visible = None
            return True
        self.visible = batch.step if await in_io_thread(self._may_be_visible, batch.step) else None
        return False

    def _may_be_visible(self, step: int) -> bool:
        """True also if the disk does not tell."""
        try:
            return read_manifest(self.store, step) is not None
        except (OSError, BlobError):
            return True

    def _seal(self, batch: BatchRecord, ranks: list[EncodedRank], start_version: int) -> None:
        """In a thread, the plan included: 12 ms for 2,048 rollouts, whose records do not change meanwhile."""
        if batch.step == FIRST_STEP and start_version > START_VERSION:  # readers ask for it when the step is there
            write_start(self._config.run_dir, StartVersion(version=start_version))
        plan = batch_plan(self._config, batch)
        self.publish(seal_manifest(self.store, plan, ranks, estimator_state=batch.estimator_state))

    def publish(self, manifest: Manifest) -> None:
        """For a format of prime-rl: put the files where its trainer expects them. Idempotent."""
        if manifest.plan.format != "native":
            publish_prime_rl(self.store, manifest, self._config.prime_rl_dir)
