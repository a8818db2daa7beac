"""The estimator's two phases, and the group filters, which need the shaped rewards of the first."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from penstock.advantages import BatchValues, Floats, GroupValues, TurnValues, batch_phase, group_phase, resolve
from penstock.batches.credit import Credit, StepCredit, credit_key, read_credit, write_credit
from penstock.config import RunConfig
from penstock.filters import GroupRewards, group_filters, judge_group
from penstock.messages import AdvantageResult, GroupInputs, RolloutResult, StepAdvantages, StepValues
from penstock.store import Store
from penstock.store.columns import read_columns

Number = TypeVar("Number", int, float)
NO_CREDIT = Credit(values=(), rewards=(), agents=(), tokens=())
NO_TURNS = TurnValues(rewards=np.empty(0), agents=(), tokens=np.empty(0, np.int64))


def estimate_group(store: Store, group: GroupInputs, config: RunConfig, *, execution: str) -> AdvantageResult:
    """An estimator that answers per turn reads the table of turns of each rollout and writes a file beside it."""
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
        agents=_named([result.agents for result in results]),
        agent_rewards=_named([result.agent_rewards for result in results]),
        by_turn=tuple(_turns(store, result) for result in results) if recipe.estimator.per_turn else (),
        environment=group.environment,
        example=group.example,
    )
    advantages = group_phase(values, recipe)
    filters = group_filters(config.filters, needs_variance=recipe.needs_variance)
    judged = GroupRewards(rewards=rewards, shaped=advantages.shaped, judged=advantages.judged)
    verdict = judge_group(judged, filters)
    if advantages.by_turn is not None and not verdict.drop_reason:
        for result, turns, of_turns in zip(results, values.by_turn, advantages.by_turn, strict=True):
            if result.columns:
                write_credit(store, credit_key(result.columns.key, execution), _credit(turns, of_turns))
    rollouts = (member.rollout for member in group.members)
    return AdvantageResult(
        advantages=dict(zip(rollouts, advantages.values.tolist(), strict=True)),
        dropped=verdict.drop_reason,
        masked=verdict.masked,
        credit=execution if advantages.by_turn is not None else None,
    )


def estimate_step(store: Store, step: StepValues, config: RunConfig, *, credit: str) -> StepAdvantages:
    """`credit` is the key of the file for an estimator that answers per turn."""
    recipe = resolve(config.advantages, group_size=config.rollouts.group_size)
    rewards = np.array(step.rewards, np.float64)
    values = BatchValues(
        values=np.array(step.values, np.float64),
        sampled_tokens=np.array(step.completion_tokens, np.int64),
        rewards=rewards,
        named_rewards=_named_rewards(step.named_rewards, rewards, step.failed),
        agents=_named(step.agents),
        agent_rewards=_named(step.agent_rewards),
        groups=tuple(step.groups),
        environments=tuple(step.environments),
        examples=tuple(step.examples),
    )
    if recipe.estimator.per_turn:
        given = [read_credit(store, key) if key else NO_CREDIT for key in step.credit]
        values = replace(
            values,
            by_turn=tuple(map(_turns_of, given)),
            turn_values=tuple(np.array(each.values, np.float64) for each in given),
        )
    result = batch_phase(values, recipe, step.state)
    advantages = dict(zip(step.rollouts, result.values.tolist(), strict=True))
    if result.by_turn is None:
        return StepAdvantages(advantages=advantages, state=result.state)
    by_turn = tuple(tuple(each.tolist()) for each in result.by_turn)
    write_credit(store, credit, StepCredit(rollouts=tuple(step.rollouts), values=by_turn))
    return StepAdvantages(advantages=advantages, state=result.state, credit=credit)


def _named_rewards(named: Sequence[Mapping[str, float]], rewards: Floats, failed: Sequence[bool]) -> dict[str, Floats]:
    """A rollout whose policy failed has no parts: its reward stands for each."""
    missing = [float(reward) if fails else np.nan for reward, fails in zip(rewards, failed, strict=True)]
    names = dict.fromkeys(name for parts in named for name in parts)
    return {
        name: np.array([parts.get(name, other) for parts, other in zip(named, missing, strict=True)], np.float64)
        for name in names
    }


def _named(entries: Sequence[Mapping[str, Number]]) -> tuple[Mapping[str, Number], ...]:
    return tuple(entries) if any(entries) else ()


def _turns(store: Store, result: RolloutResult) -> TurnValues:
    """The filtering job has verified the columns."""
    if result.columns is None:
        return NO_TURNS
    turns = read_columns(store, result.columns, verify=False).turns
    return TurnValues(
        rewards=np.array(turns.reward),
        agents=tuple(turns.words["agent"][index] for index in turns.agent.tolist()),
        tokens=turns.end - turns.start,
    )


def _credit(turns: TurnValues, values: Floats) -> Credit:
    return Credit(
        values=tuple(values.tolist()),
        rewards=tuple(None if reward != reward else reward for reward in turns.rewards.tolist()),
        agents=turns.agents,
        tokens=tuple(turns.tokens.tolist()),
    )


def _turns_of(credit: Credit) -> TurnValues:
    rewards = [np.nan if reward is None else reward for reward in credit.rewards]
    return TurnValues(
        rewards=np.array(rewards, np.float64), agents=credit.agents, tokens=np.array(credit.tokens, np.int64)
    )
