"""The formulas of estimators with one value a turn: turns and agents of one rollout may have different advantages."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.advantages.formulas import STD_EPSILON
from penstock.advantages.values import BatchValues, Floats, GroupValues, TurnValues, deviation, mean
from penstock.filters import rewards_are_equal


def grpo_process(group: GroupValues) -> list[Floats]:
    """GRPO with process supervision (DeepSeekMath 4.1.3): the rewards of all turns of the group, normalised together; a
    turn has the sum of its own and the later ones. A rollout without turn rewards has its reward at its last turn."""
    rewards = [_process_rewards(turns, reward) for turns, reward in zip(group.by_turn, group.rewards, strict=True)]
    given = np.concatenate([each[~np.isnan(each)] for each in rewards])
    if given.size < 2 or rewards_are_equal(given):
        return [np.zeros(len(each)) for each in rewards]
    average, spread = mean(given), deviation(given) + STD_EPSILON
    return [np.cumsum(np.nan_to_num((each - average) / spread)[::-1])[::-1] for each in rewards]


def grpo_agents(group: GroupValues) -> list[Floats]:
    """The rewards of each agent normalised among the rollouts of the group in which it took part."""
    rewards = by_agent(group)
    names = dict.fromkeys(name for turns in group.by_turn for name in turns.agents)
    values = [np.zeros(len(each)) for each in rewards]
    for name in names:
        turns = [np.array([agent == name for agent in each.agents], bool) for each in group.by_turn]
        own = np.array([each[mask][0] for each, mask in zip(rewards, turns, strict=True) if mask.any()])
        if own.size < 2 or rewards_are_equal(own):
            continue
        for value, reward, mask in zip(values, rewards, turns, strict=True):
            value[mask] = (reward[mask] - mean(own)) / (deviation(own) + STD_EPSILON)
    return values


def by_agent(group: GroupValues) -> list[Floats]:
    """Each turn has the reward of its agent; that of the rollout where the score has none for it."""
    given = group.agent_rewards or ({},) * len(group.rewards)
    return [
        np.array([named.get(agent, reward) for agent in turns.agents], np.float64)
        for turns, named, reward in zip(group.by_turn, given, group.rewards, strict=True)
    ]


def rae(batch: BatchValues, state: Mapping[str, float], *, decay: float) -> tuple[list[Floats], dict[str, float]]:
    """Role-conditioned advantages (SPIRAL): the reward of an agent less its moving mean in that environment, which
    then takes it in, rollout by rollout."""
    baselines, values = dict(state), list[Floats]()
    for turns, rewards, environment in zip(batch.by_turn, batch.turn_values, batch.environments, strict=True):
        value = np.zeros(len(rewards))
        for agent in dict.fromkeys(turns.agents):
            mask = np.array([each == agent for each in turns.agents], bool)
            key, reward = f"{environment}/{agent}", float(rewards[mask][0])
            before = baselines.get(key, 0.0)
            value[mask] = reward - before
            baselines[key] = decay * before + (1 - decay) * reward
        values.append(value)
    return values, baselines


def token_means(values: Sequence[Floats], turns: Sequence[TurnValues]) -> Floats:
    """One value a rollout: the mean over its completion tokens; 0 without any."""
    return np.array(
        [
            math.fsum(value * each.tokens) / tokens if (tokens := int(each.tokens.sum())) else 0.0
            for value, each in zip(values, turns, strict=True)
        ],
        np.float64,
    )


def _process_rewards(turns: TurnValues, reward: float) -> Floats:
    if not len(turns.rewards) or not np.isnan(turns.rewards).all():
        return turns.rewards
    return np.append(np.full(len(turns.rewards) - 1, np.nan), reward)
