"""Score: the rewards of a group, if its environment scores whole groups."""

from headpond.ledger.states import RolloutState
from headpond.orchestrator.ledger.rows import GroupRecord, JobRecord
from headpond.orchestrator.stage import GroupStage
from headpond.tasks.stages import score


class Score(GroupStage[score.ScoreResult]):
    stage = score.STAGE

    def wants(self, group: GroupRecord) -> bool:
        scores_groups = self._ledger.state.environments[group.environment].scores_groups
        return scores_groups and bool(group.of(RolloutState.GENERATED))

    def fields(self, job: JobRecord) -> dict[str, str]:
        return {"environment": self._ledger.groups[job.subject].environment}

    def fits(self, job: JobRecord, result: score.ScoreResult) -> bool:
        return self.names_all(job, result.rewards)

    def apply(self, group: GroupRecord, result: score.ScoreResult) -> None:
        for rollout in group.of(RolloutState.GENERATED):
            named = {name: parts[rollout.id] for name, parts in result.named.items() if rollout.id in parts}
            self._ledger.score(rollout, result.rewards[rollout.id], named)
