"""Filter: the verdicts of the token filters on a group's rollouts."""

import sys
from collections import Counter

from headpond.ledger.states import RolloutState
from headpond.orchestrator.ledger.rows import GroupRecord
from headpond.orchestrator.stage import GroupStage
from headpond.tasks.stages import filter as filtering


class Filter(GroupStage[filtering.FilterResult]):
    stage = filtering.STAGE

    def enter(self, group: GroupRecord) -> None:
        """Count the rewards before a filter drops the groups that are solved by all or by none."""
        environment = self._ledger.state.environments[group.environment]
        rewards = [rollout.result.reward for rollout in group.rollouts if rollout.result]
        environment.played += len(rewards)
        environment.played_reward = _finite(environment.played_reward + sum(rewards))
        environment.solved |= {group.solved: environment.solved.get(group.solved, 0) + 1}
        super().enter(group)

    def apply(self, group: GroupRecord, result: filtering.FilterResult) -> str | None:
        self._ledger.state.matched = Counter(self._ledger.state.matched) + Counter(result.matched)
        for rollout in group.of(RolloutState.GENERATED):
            if rollout.id in result.dropped:
                self._ledger.drop(rollout, result.dropped[rollout.id])
            elif rollout.id in result.masked:
                self._ledger.mask(rollout)
        return None if group.of(RolloutState.GENERATED) else "filtered"


def _finite(number: float) -> float:
    """The nearest number that JSON has: rewards may have any size, and the ledger would read their sum as None."""
    return max(-sys.float_info.max, min(number, sys.float_info.max))
