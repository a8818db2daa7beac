"""Advantage: the estimator's group phase, and the group filters, which need its shaped rewards."""

import numpy as np
from pydantic import FiniteFloat

from headpond.advantages import Floats, GroupValues, TurnValues, group_phase, resolve
from headpond.advantages.values import named_rewards, named_values
from headpond.batches.credit import Credit, credit_key, write_credit
from headpond.broker.queues import Queue
from headpond.config import RunConfig
from headpond.filters import GroupRewards, group_filters, judge_group
from headpond.ids import LeaseId
from headpond.records.inputs import GroupInputs
from headpond.records.rollout import RolloutResult
from headpond.records.wire import Result
from headpond.store import Store
from headpond.store.columns import read_columns
from headpond.tasks import inputs
from headpond.tasks.stage import Call, PlanMessage, Stage, Subject

NO_TURNS = TurnValues(rewards=np.empty(0), agents=(), tokens=np.empty(0, np.int64))


class AdvantageResult(Result):
    advantages: dict[str, FiniteFloat] = {}
    dropped: str | None = None  # reason that drops the whole group, e.g. zero variance
    masked: bool = False  # deliver the whole group with loss mask 0
    # execution that wrote the values of the turns into a file beside each rollout's columns;
    # None without
    credit: str | None = None

    def names_only_files_of(self, execution: LeaseId) -> bool:
        return self.credit in (None, execution.execution)


def estimate(call: Call[PlanMessage]) -> AdvantageResult:
    group = inputs.read(call.store, call.message.plan, GroupInputs)
    return estimate_group(call.store, group, call.config, execution=call.execution)


def estimate_group(store: Store, group: GroupInputs, config: RunConfig, *, execution: str) -> AdvantageResult:
    """An estimator that answers per turn reads the table of turns of each rollout and writes a file beside it."""
    recipe = resolve(config.advantages, group_size=config.rollouts.group_size)
    results = list(group.members.values())
    rewards = np.array([result.reward for result in results], np.float64)
    values = GroupValues(
        rewards=rewards,
        completion_tokens=np.array([result.completion_tokens for result in results], np.int64),
        tool_tokens=np.array([result.tool_tokens for result in results], np.int64),
        input_tokens=np.array([result.prompt_tokens for result in results], np.int64),
        turns=np.array([result.turns for result in results], np.int64),
        named_rewards=named_rewards(
            [result.rewards for result in results], rewards, [result.policy_error is not None for result in results]
        ),
        agents=named_values([result.agents for result in results]),
        agent_rewards=named_values([result.agent_rewards for result in results]),
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
    return AdvantageResult(
        advantages=dict(zip(group.members, advantages.values.tolist(), strict=True)),
        dropped=verdict.drop_reason,
        masked=verdict.masked,
        credit=execution if advantages.by_turn is not None else None,
    )


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


STAGE = Stage(
    name="advantage",
    queue=Queue.ADVANTAGES,
    task="headpond.advantages.run",
    subject=Subject.GROUP,
    message=PlanMessage,
    result=AdvantageResult,
    body=estimate,
)
