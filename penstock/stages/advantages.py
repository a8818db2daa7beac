"""The estimator's group phase, and the group filters, which need its shaped rewards. The orchestrator's composer runs
the batch phase."""

import numpy as np

from penstock.advantages import GroupValues, group_phase, resolve
from penstock.config import RunConfig
from penstock.filters import GroupRewards, group_filters, judge_group
from penstock.messages import AdvantageResult, GroupInputs


def estimate_group(group: GroupInputs, config: RunConfig) -> AdvantageResult:
    recipe = resolve(config.advantages, group_size=config.rollouts.group_size)
    results = [member.result for member in group.members]
    rewards = np.array([result.reward for result in results], np.float64)
    values = GroupValues(
        rewards=rewards,
        completion_tokens=np.array([result.completion_tokens for result in results], np.int64),
        tool_tokens=np.array([result.tool_tokens for result in results], np.int64),
        input_tokens=np.array([result.prompt_tokens for result in results], np.int64),
        turns=np.array([result.turns for result in results], np.int64),
    )
    advantages = group_phase(values, recipe)
    filters = group_filters(config.filters, needs_variance=recipe.needs_variance)
    verdict = judge_group(GroupRewards(rewards=rewards, shaped=advantages.shaped), filters)
    rollouts = (member.rollout for member in group.members)
    return AdvantageResult(
        advantages=dict(zip(rollouts, advantages.values.tolist(), strict=True)),
        dropped=verdict.drop_reason,
        masked=verdict.masked,
    )
