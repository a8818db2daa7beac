"""Advantage: the values of the estimator's group phase, and the verdict of the group filters."""

from headpond.batches.credit import credit_key
from headpond.ledger.states import RolloutState
from headpond.orchestrator.ledger.rows import GroupRecord, JobRecord
from headpond.orchestrator.stage import GroupStage
from headpond.tasks.stages import advantage


class Advantage(GroupStage[advantage.AdvantageResult]):
    stage = advantage.STAGE

    def fits(self, job: JobRecord, result: advantage.AdvantageResult) -> bool:
        return bool(result.dropped) or self.names_all(job, result.advantages)

    def apply(self, group: GroupRecord, result: advantage.AdvantageResult) -> str | None:
        if result.dropped:
            return result.dropped
        group.masked = result.masked
        for rollout in group.of(RolloutState.GENERATED):
            assert rollout.result is not None
            columns = rollout.result.columns
            credit = credit_key(columns.key, result.credit) if result.credit and columns else None
            self._ledger.estimate(rollout, result.advantages[rollout.id], masked=result.masked, credit=credit)
        return None
