"""Batch phase: the estimator's second phase, over the rollouts of one step. Its result is a file in the store."""

from dataclasses import replace

import numpy as np

from headpond.advantages import BatchValues, TurnValues, batch_phase, resolve
from headpond.advantages.values import named_rewards, named_values
from headpond.batches.credit import Credit, StepCredit, read_credit, write_credit
from headpond.broker.queues import Queue
from headpond.config import RunConfig
from headpond.ids import LeaseId
from headpond.records.inputs import StepAdvantages, StepValues
from headpond.records.wire import Result
from headpond.store import Store
from headpond.tasks import inputs
from headpond.tasks.stage import Call, PlanMessage, Stage, Subject

NO_CREDIT = Credit(values=(), rewards=(), agents=(), tokens=())


class BatchPhaseMessage(PlanMessage):
    step: int
    formation: int


class BatchPhaseResult(Result):
    execution: str  # that wrote the step's StepAdvantages: part of the file's key in the store

    def names_only_files_of(self, execution: LeaseId) -> bool:
        return self.execution == execution.execution


def advantages_key(run: str, step: int, formation: int, execution: str) -> str:
    """No execution overwrites the file of another."""
    return inputs.step_key(run, step, formation, f"advantages.{execution}")


def step_credit_key(run: str, step: int, formation: int, execution: str) -> str:
    """The advantages of the step's turns, which encoding jobs read."""
    return inputs.step_key(run, step, formation, f"credit.{execution}")


def estimate(call: Call[BatchPhaseMessage]) -> BatchPhaseResult:
    message = call.message
    of_step = message.run, message.step, message.formation, call.execution
    values = inputs.read(call.store, message.plan, StepValues)
    advantages = estimate_step(call.store, values, call.config, credit=step_credit_key(*of_step))
    inputs.write(call.store, advantages_key(*of_step), advantages)
    return BatchPhaseResult(execution=call.execution)


def estimate_step(store: Store, step: StepValues, config: RunConfig, *, credit: str) -> StepAdvantages:
    """`credit` is the key of the file for an estimator that answers per turn."""
    recipe = resolve(config.advantages, group_size=config.rollouts.group_size)
    rewards = np.array(step.rewards, np.float64)
    values = BatchValues(
        values=np.array(step.values, np.float64),
        sampled_tokens=np.array(step.completion_tokens, np.int64),
        rewards=rewards,
        named_rewards=named_rewards(step.named_rewards, rewards, step.failed),
        agents=named_values(step.agents),
        agent_rewards=named_values(step.agent_rewards),
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


def _turns_of(credit: Credit) -> TurnValues:
    rewards = [np.nan if reward is None else reward for reward in credit.rewards]
    return TurnValues(
        rewards=np.array(rewards, np.float64), agents=credit.agents, tokens=np.array(credit.tokens, np.int64)
    )


STAGE = Stage(
    name="batch_phase",
    queue=Queue.ADVANTAGES,
    task="headpond.advantages.batch",
    subject=Subject.STEP,
    message=BatchPhaseMessage,
    result=BatchPhaseResult,
    body=estimate,
    gate="encoding",
)
