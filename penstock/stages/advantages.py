"""The estimator's two phases, and the group filters, which need the shaped rewards of the first."""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.advantages import BatchValues, Floats, GroupValues, batch_phase, group_phase, resolve
from penstock.config import RunConfig
from penstock.filters import GroupRewards, group_filters, judge_group
from penstock.messages import AdvantageResult, GroupInputs, StepAdvantages, StepValues


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
        named_rewards=_named_rewards(
            [result.rewards for result in results], rewards, [result.policy_error is not None for result in results]
        ),
        agents=_agents([result.agents for result in results]),
        environment=group.environment,
        example=group.example,
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


def estimate_step(step: StepValues, config: RunConfig) -> StepAdvantages:
    recipe = resolve(config.advantages, group_size=config.rollouts.group_size)
    rewards = np.array(step.rewards, np.float64)
    values = BatchValues(
        values=np.array(step.values, np.float64),
        sampled_tokens=np.array(step.completion_tokens, np.int64),
        rewards=rewards,
        named_rewards=_named_rewards(step.named_rewards, rewards, step.failed),
        agents=_agents(step.agents),
        groups=tuple(step.groups),
        environments=tuple(step.environments),
        examples=tuple(step.examples),
    )
    result = batch_phase(values, recipe, step.state)
    advantages = dict(zip(step.rollouts, result.values.tolist(), strict=True))
    return StepAdvantages(advantages=advantages, state=result.state)


def _named_rewards(named: Sequence[Mapping[str, float]], rewards: Floats, failed: Sequence[bool]) -> dict[str, Floats]:
    """A rollout whose policy failed has no parts: its reward stands for each."""
    missing = [float(reward) if fails else np.nan for reward, fails in zip(rewards, failed, strict=True)]
    names = dict.fromkeys(name for parts in named for name in parts)
    return {
        name: np.array([parts.get(name, other) for parts, other in zip(named, missing, strict=True)], np.float64)
        for name in names
    }


def _agents(agents: Sequence[Mapping[str, int]]) -> tuple[Mapping[str, int], ...]:
    return tuple(agents) if any(agents) else ()
