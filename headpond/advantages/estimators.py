"""The estimators and their formulas: a function of a group's shaped rewards, and sometimes one of
the batch's values.

Estimators with one value a rollout come first. Those with one value a turn follow: turns and agents
of one rollout may have different advantages. `built_in` lists all.

`advantages.estimator = "module:attribute"` selects one of your own: an `Estimator`, or a
function for its group phase.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from headpond.advantages.values import MAX_REWARD, BatchValues, Floats, GroupValues, TurnValues, deviation, mean
from headpond.errors import StageError
from headpond.filters import rewards_are_equal

STD_EPSILON = 1e-6
"""Added to a group's standard deviation. verl and others use the same value: results stay
comparable."""
BATCH_STD_EPSILON = 1e-4
"""Added to the standard deviation of a batch's rewards. TRL uses the same value."""
VARIANCE_EPSILON = 1e-8
"""Added to the variance that whitening divides by (verl), or its least value (NeMo-RL,
OpenRLHF)."""
GREEDY = "greedy"
"""Name of the reward that `remax` subtracts: the reward of a greedy completion."""
Whitening = Literal["verl", "nemo_rl", "openrlhf"]


@dataclass(frozen=True, kw_only=True)
class Estimator:
    group: Callable[[GroupValues], Floats] | Callable[[GroupValues], Sequence[Floats]]
    """Maps a group with shaped rewards to one value a rollout; with `per_turn`, to one array of
    values a rollout."""
    batch: Callable[[BatchValues], Any] | Callable[[BatchValues, Any], tuple[Any, Any]] | None = None
    """Maps the values of a whole batch to advantages. None: the group's values are final."""
    state: Any = None
    """The state before the first step: any JSON value, or None for no state. With a state,
    `batch` takes (values, state) and returns (advantages, next state). The step stores its next
    state: a step that is formed again starts from the state before it."""
    needs_variance: bool = True
    """The values are differences within a group. Equal rewards give exactly 0, and the
    zero-variance filter applies."""
    variance_of: Literal["rewards", "values"] = "rewards"
    """The column that must differ: the shaped rewards, or the values that `group` returns."""
    per_turn: bool = False
    """Both functions return one array for each rollout, with one value for each of its turns."""
    min_reward: float = -MAX_REWARD


def unchanged(group: GroupValues) -> Floats:
    return group.rewards


def centered(group: GroupValues) -> Floats:
    return group.rewards - mean(group.rewards)


def grpo(group: GroupValues) -> Floats:
    return centered(group) / (deviation(group.rewards) + STD_EPSILON)


def grpo_leave_one_out(group: GroupValues) -> Floats:
    """Subtract the mean of the other rollouts and divide by their deviation, as NeMo-RL does.
    Equal other rewards leave the difference undivided."""
    values = np.zeros(len(group.rewards))
    for index, reward in enumerate(group.rewards):
        other_rewards = np.delete(group.rewards, index)
        differ = len(other_rewards) > 1 and not rewards_are_equal(other_rewards)
        values[index] = (reward - mean(other_rewards)) / (deviation(other_rewards) + STD_EPSILON if differ else 1.0)
    return values


def rloo(group: GroupValues) -> Floats:
    size = len(group.rewards)
    return centered(group) * size / (size - 1)


def opo(group: GroupValues) -> Floats:
    """Subtract the mean reward of a completion token: the optimal baseline if gradients grow
    with length."""
    tokens = int(group.completion_tokens.sum())
    if not tokens:
        return centered(group)
    return group.rewards - math.fsum(group.rewards * group.completion_tokens) / tokens


def remax(group: GroupValues) -> Floats:
    greedy = group.named_rewards.get(GREEDY, np.full(len(group.rewards), np.nan))
    if np.isnan(greedy).any():
        raise StageError(f'remax needs the reward of a greedy completion: return Score(rewards={{"{GREEDY}": ...}})')
    return group.rewards - greedy


def max_rl(group: GroupValues) -> Floats:
    average = mean(group.rewards)
    return centered(group) / average if average > 0 else np.zeros(len(group.rewards))


def pass_at_k(group: GroupValues) -> Floats:
    second, best = np.sort(group.rewards)[-2:]
    values = np.zeros(len(group.rewards))
    values[group.rewards.argmax()] = best - second
    return values


def pass_at_k_normalised(group: GroupValues) -> Floats:
    return pass_at_k(group) / (deviation(group.rewards) + STD_EPSILON)


def gdpo(group: GroupValues, *, weights: Mapping[str, float]) -> Floats:
    """Normalise each named reward as `grpo` does, then return their weighted sum."""
    if len(group.named_rewards) < 2:
        raise StageError(f"gdpo needs two or more named rewards, the scores have {sorted(group.named_rewards)}")
    if unknown := sorted(weights.keys() - group.named_rewards.keys()):
        raise StageError(f"advantages.reward_weights names {unknown}, which no score of the group has")
    values = np.zeros(len(group.rewards))
    for name, rewards in sorted(group.named_rewards.items()):
        if np.isnan(rewards).any():
            raise StageError(f"gdpo needs the named reward {name!r} of every rollout: return it in every Score")
        if not rewards_are_equal(rewards):
            values += weights.get(name, 1.0) * (rewards - mean(rewards)) / (deviation(rewards) + STD_EPSILON)
    return values


def standardised(batch: BatchValues) -> Floats:
    """Scale to mean 0 and standard deviation 1 over the batch's rollouts, like NeMo-RL's GDPO."""
    if len(batch.values) < 2:
        return np.zeros(len(batch.values))
    spread = deviation(batch.values)
    return (batch.values - mean(batch.values)) / (spread if spread > 0 else 1.0)


def scaled_by_batch(batch: BatchValues) -> Floats:
    """Divide by the standard deviation of all rewards of the batch, like TRL's
    `scale_rewards="batch"`."""
    if len(batch.rewards) < 2:
        return np.zeros(len(batch.values))
    return batch.values / (deviation(batch.rewards) + BATCH_STD_EPSILON)


def whiten(batch: BatchValues, *, by: Whitening) -> Floats:
    """Scale to mean 0 and variance 1 over the batch's sampled tokens, as the named framework does.
    Each token carries its rollout's value. With verl, the variance has n - 1 (Bessel), and
    VARIANCE_EPSILON is added to it; else that is the variance's minimum."""
    weights, tokens = batch.sampled_tokens, int(batch.sampled_tokens.sum())
    if tokens < 2:
        return np.zeros(len(batch.values))
    differences = batch.values - math.fsum(weights * batch.values) / tokens
    variance = math.fsum(weights * differences**2) / (tokens - 1 if by == "verl" else tokens)
    return differences / math.sqrt(variance + VARIANCE_EPSILON if by == "verl" else max(variance, VARIANCE_EPSILON))


def grpo_process(group: GroupValues) -> list[Floats]:
    """Apply GRPO with process supervision (DeepSeekMath 4.1.3). All turn rewards of the group
    are normalised together; a turn has the sum of its own and the later ones. A rollout without
    turn rewards has its reward at its last turn."""
    rewards = [_process_rewards(turns, reward) for turns, reward in zip(group.by_turn, group.rewards, strict=True)]
    turn_rewards = np.concatenate([row[~np.isnan(row)] for row in rewards])
    if turn_rewards.size < 2 or rewards_are_equal(turn_rewards):
        return [np.zeros(len(row)) for row in rewards]
    average, spread = mean(turn_rewards), deviation(turn_rewards) + STD_EPSILON
    return [np.cumsum(np.nan_to_num((row - average) / spread)[::-1])[::-1] for row in rewards]


def _process_rewards(turns: TurnValues, reward: float) -> Floats:
    if not len(turns.rewards) or not np.isnan(turns.rewards).all():
        return turns.rewards
    return np.append(np.full(len(turns.rewards) - 1, np.nan), reward)


def grpo_agents(group: GroupValues) -> list[Floats]:
    """Normalise the rewards of each agent among the group's rollouts in which it took part."""
    rewards = by_agent(group)
    names = dict.fromkeys(name for turns in group.by_turn for name in turns.agents)
    values = [np.zeros(len(row)) for row in rewards]
    for name in names:
        turns = [np.array([agent == name for agent in turn_values.agents], bool) for turn_values in group.by_turn]
        agent_rewards = np.array([row[mask][0] for row, mask in zip(rewards, turns, strict=True) if mask.any()])
        if agent_rewards.size < 2 or rewards_are_equal(agent_rewards):
            continue
        for value, reward, mask in zip(values, rewards, turns, strict=True):
            value[mask] = (reward[mask] - mean(agent_rewards)) / (deviation(agent_rewards) + STD_EPSILON)
    return values


def by_agent(group: GroupValues) -> list[Floats]:
    """Give each turn the reward of its agent, or the rollout's reward if the score has none for
    that agent."""
    agent_rewards = group.agent_rewards or ({},) * len(group.rewards)
    return [
        np.array([named.get(agent, reward) for agent in turns.agents], np.float64)
        for turns, named, reward in zip(group.by_turn, agent_rewards, group.rewards, strict=True)
    ]


def rae(batch: BatchValues, state: Mapping[str, float], *, decay: float) -> tuple[list[Floats], dict[str, float]]:
    """Compute role-conditioned advantages (SPIRAL): an agent's reward less its moving mean in
    that environment. The mean takes in the reward afterwards, rollout by rollout."""
    baselines, values = dict(state), list[Floats]()
    for turns, rewards, environment in zip(batch.by_turn, batch.turn_values, batch.environments, strict=True):
        value = np.zeros(len(rewards))
        for agent in dict.fromkeys(turns.agents):
            mask = np.array([name == agent for name in turns.agents], bool)
            key, reward = f"{environment}/{agent}", float(rewards[mask][0])
            baseline = baselines.get(key, 0.0)
            value[mask] = reward - baseline
            baselines[key] = decay * baseline + (1 - decay) * reward
        values.append(value)
    return values, baselines


def built_in(by: Whitening, *, weights: Mapping[str, float], decay: float) -> dict[str, Estimator]:
    """Return the built-in estimators by their name in `advantages.estimator`. The arguments are
    settings that some of them use."""
    whitened, weighted_gdpo, decaying_rae = (
        partial(whiten, by=by),
        partial(gdpo, weights=weights),
        partial(rae, decay=decay),
    )
    return {
        "grpo": Estimator(group=grpo),
        "grpo_leave_one_out": Estimator(group=grpo_leave_one_out),
        "grpo_batch": Estimator(group=centered, batch=scaled_by_batch),
        "dr_grpo": Estimator(group=centered),
        "rloo": Estimator(group=rloo),
        "opo": Estimator(group=opo),
        "remax": Estimator(group=remax, needs_variance=False),
        "reinforce_pp": Estimator(group=unchanged, batch=whitened, needs_variance=False),
        "reinforce_pp_baseline": Estimator(group=centered, batch=whitened),
        "max_rl": Estimator(group=max_rl, min_reward=0.0),
        "gdpo": Estimator(group=weighted_gdpo, batch=standardised, variance_of="values"),
        "pass_at_k": Estimator(group=pass_at_k),
        "pass_at_k_normalised": Estimator(group=pass_at_k_normalised),
        "grpo_process": Estimator(group=grpo_process, per_turn=True, variance_of="values"),
        "grpo_agents": Estimator(group=grpo_agents, per_turn=True, variance_of="values"),
        "rae": Estimator(group=by_agent, batch=decaying_rae, state={}, per_turn=True, needs_variance=False),
        "none": Estimator(group=unchanged, needs_variance=False),
    }


ESTIMATORS: Mapping[str, Estimator] = built_in("verl", weights={}, decay=0.95)
"""The built-in estimators with default parameters."""
