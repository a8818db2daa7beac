"""Length shaping: raises or lowers rewards to favour a group's shorter rollouts, before the
baseline is computed."""

from collections.abc import Callable

import numpy as np

from headpond.advantages.values import Floats, GroupValues, mean

Shaping = Callable[[GroupValues], Floats]  # Maps a group to its shaped rewards.


def unshaped(group: GroupValues) -> Floats:
    return group.rewards


def shape_by_tokens(group: GroupValues, *, completion_weight: float, tool_weight: float) -> Floats:
    return reward_brevity(group.rewards, completion_weight * group.completion_tokens + tool_weight * group.tool_tokens)


def shape_by_turns(group: GroupValues) -> Floats:
    return reward_brevity(group.rewards, group.turns.astype(np.float64))


def shape_linearly(group: GroupValues, *, completion_weight: float, input_weight: float, turn_weight: float) -> Floats:
    """Lower each reward by shares of the group's mean reward. Each count has a share, relative
    to the group's largest count."""
    counts = [group.completion_tokens, group.input_tokens, group.turns]
    weights = [completion_weight, input_weight, turn_weight]
    shares = [weight * count / max(count.max(), 1) for weight, count in zip(weights, counts, strict=True)]
    return group.rewards - mean(group.rewards) * np.add.reduce(shares)


def punish_overlong(group: GroupValues, *, tokens: int, buffer: int, penalty: float) -> Floats:
    """Subtract DAPO's soft overlong punishment. It is 0 up to `tokens - buffer` completion
    tokens, then grows linearly to `penalty` at `tokens`."""
    excess = group.completion_tokens - (tokens - buffer)
    return group.rewards - penalty * np.clip(excess / buffer, 0, 1)


def reward_brevity(rewards: Floats, costs: Floats) -> Floats:
    """Raise the best rewards by up to their own size, and lower none. The rise is in proportion
    to how far a rollout's cost is below the mean cost of the best."""
    best = rewards == rewards.max()
    mean_cost = mean(costs[best])
    if rewards.max() <= 0 or mean_cost <= 0:
        return rewards
    return rewards * (1 + best * np.clip(1 - costs / mean_cost, 0, 1))
