"""Admitted groups become steps, one open step at a time; groups are never split, and nothing stale is taken."""

import logging
import math
from collections.abc import Callable

import numpy as np

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.records import BatchRecord, GroupRecord, RolloutRecord
from orchestrator.quotas import quotas, weight
from orchestrator.staleness import Staleness
from orchestrator.trainer import Trainer
from penstock.advantages import ESTIMATORS, BatchValues, batch_phase, resolve
from penstock.batches import EncodedRank
from penstock.config import RunConfig
from penstock.errors import RunError
from penstock.ledger.states import GroupState, JobKind, JobState, RolloutState

logger = logging.getLogger("penstock.composer")


class Composer:
    def __init__(self, config: RunConfig, ledger: Ledger, trainer: Trainer) -> None:
        self._config = config
        self._ledger = ledger
        self._trainer = trainer
        self._staleness = Staleness(config, ledger)
        self._judged: tuple[int, set[str]] = (0, set())
        """a policy version, and the admitted groups whose rollouts were held against it"""

    def compose(self) -> BatchRecord | None:
        """Form the next step if there is enough; its encoding jobs are created in the same transaction."""
        step = self._ledger.number("steps_delivered")
        if self._ledger.batches or step >= self._config.steps or not self._trainer.may_seal(step):
            return None
        self._drop_stale()
        groups = self._take(step)
        if groups is None:
            return None
        batch = self._ledger.compose(step, groups, self._final_advantages(groups, RolloutState.ADMITTED))
        for data_rank in range(self._files):
            self._ledger.add_job(batch.job_id(data_rank), JobKind.ENCODE, str(step))
        return batch

    def resume(self) -> None:
        """Decide the advantages of an open step that a ledger from before they were kept does not hold."""
        for batch in self._ledger.batches.values():
            if not batch.advantages:
                advantages = self._final_advantages(batch.groups, RolloutState.BATCHED)
                self._ledger.set_advantages(batch, advantages)

    def _final_advantages(self, groups: list[GroupRecord], state: RolloutState) -> dict[str, float]:
        """Rollout -> advantage, after the estimator's batch phase if it has one: 1 ms for 4,096 rollouts."""
        rollouts = sorted((rollout for group in groups for rollout in group.of(state)), key=lambda rollout: rollout.id)
        advantages = {rollout.id: rollout.advantage or 0.0 for rollout in rollouts}
        if self._config.advantages.estimator not in ESTIMATORS:
            return advantages  # a custom estimator, known to the workers only, has no batch phase
        recipe = resolve(self._config.advantages, group_size=self._config.rollouts.group_size)
        if not recipe.has_batch_phase:
            return advantages
        tokens = [rollout.result.completion_tokens for rollout in rollouts if rollout.result]
        values = BatchValues(
            values=np.array(list(advantages.values()), np.float64), sampled_tokens=np.array(tokens, np.int64)
        )
        return dict(zip(advantages, batch_phase(values, recipe).tolist(), strict=True))

    def encoded(self) -> tuple[BatchRecord, list[EncodedRank]] | None:
        """The open step whose every rank is in its file."""
        for batch in self._ledger.batches.values():
            jobs = [self._ledger.jobs[batch.job_id(rank)] for rank in range(self._files)]
            results = [job.result for job in jobs if job.result is not None]
            unreadable = {rollout for result in results for rollout in result.unreadable}
            dead = [job for job in jobs if job.state is JobState.DEAD]
            if unreadable:
                self._form_without(batch, unreadable)
                return None
            if dead:
                self._form_again(batch, dead[0].error)
                return None
            ranks = [result.rank for result in results if result.rank]
            if len(ranks) == len(jobs):
                return (batch, ranks) if self.still_fresh(batch) else None
        return None

    def still_fresh(self, batch: BatchRecord) -> bool:
        """Judged once more at sealing: time in queues counts. A step with something stale in it is formed again."""
        if not any(self._staleness.drops_rollout(rollout) for rollout in batch.rollouts()):
            return True
        logger.warning("action=step_formed_again step=%d a rollout became stale while it was encoded", batch.step)
        self._ledger.dissolve(batch)
        return False

    @property
    def _files(self) -> int:
        """One encoding job a data rank, where the format knows ranks."""
        return 1 if self._config.batch.format == "prime-rl-2026-05" else self._config.batch.data_ranks

    def _form_again(self, batch: BatchRecord, error: str | None) -> None:
        failed = self._ledger.count("failed_formations")
        if failed >= self._config.recovery.max_formations:
            raise RunError(
                f"step {batch.step} could not be encoded in {failed} formations, the last error: {error}. "
                "Nothing is lost: mend the cause and start the run again"
            )
        logger.warning("action=step_formed_again step=%d formation=%d error=%s", batch.step, batch.formation, error)
        self._ledger.event(f"step {batch.step}", "formed_again", error or "")
        self._ledger.dissolve(batch)

    def _form_without(self, batch: BatchRecord, unreadable: set[str]) -> None:
        """Blobs were damaged or deleted after they had been checked: the step goes on without their rollouts."""
        logger.error("action=step_formed_again step=%d unreadable=%s", batch.step, ",".join(sorted(unreadable)))
        self._ledger.event(f"step {batch.step}", "formed_again", f"{len(unreadable)} rollouts cannot be read")
        groups = list(batch.groups)
        self._ledger.dissolve(batch)
        for group in groups:
            self._drop_from(group, "blob_corrupt", lambda rollout: rollout.id in unreadable)

    def _drop_stale(self) -> None:
        """This is looked at on every wake-up: what was fresh stays so until there is a new version."""
        version, judged = self._ledger.number("policy_version"), self._judged[1]
        if version != self._judged[0]:
            judged = set[str]()
        admitted = [group for group in self._ledger.groups.values() if group.state is GroupState.ADMITTED]
        for group in admitted:
            if group.id not in judged:
                self._drop_from(group, "stale", self._staleness.drops_rollout)
        self._judged = version, {group.id for group in admitted}

    def _drop_from(self, group: GroupRecord, reason: str, unfit: Callable[[RolloutRecord], bool]) -> None:
        for rollout in filter(unfit, group.of(RolloutState.ADMITTED)):
            self._ledger.drop(rollout, reason)
        if not group.of(RolloutState.ADMITTED):
            self._ledger.enter(group, GroupState.CLOSED)

    def _take(self, step: int) -> list[GroupRecord] | None:
        """Every environment's part, or nothing yet."""
        taken: list[GroupRecord] = []
        for name, quota in quotas(self._config, step).items():
            part = self._take_from(name, quota)
            if part is None:
                return None
            taken += part
        return sorted(taken, key=lambda group: group.ordinal)

    def _take_from(self, environment: str, quota: int) -> list[GroupRecord] | None:
        open_groups = (
            group
            for group in self._ledger.groups.values()
            if group.environment == environment and group.state is not GroupState.BATCHED
        )
        window = self._window(quota)
        taken: list[GroupRecord] = []
        held, awaited = 0, False
        for place, group in enumerate(open_groups):
            # Partial groups may leave a window short that nothing more can come into: only then it is passed.
            if held >= quota or (place >= window and awaited):
                break
            if group.state is GroupState.ADMITTED:
                taken.append(group)
                held += weight(self._config, group)
            else:
                awaited = True
        return taken if held >= quota else None

    def _window(self, quota: int) -> float:
        """How many open groups, in planned order, a step may choose from."""
        if self._config.batch.order == "completion" or self._config.batch.unit == "tokens":
            return math.inf
        groups = quota if self._config.batch.unit == "groups" else -(-quota // self._config.rollouts.group_size)
        return math.ceil(self._config.batch.window * groups)
