"""The queue `advantages`: the group phase of the estimator, and the group filters. Runs on prefork."""

import numpy as np

from penstock import job_inputs
from penstock.advantages import GroupValues, group_phase, resolve
from penstock.config import RunConfig
from penstock.config.test_hooks import noop_settings
from penstock.filters import GroupRewards, group_filters, judge_group
from penstock.messages import AdvantageJob, AdvantageResult, GroupInputs, Queue
from tasks import noop
from tasks.celery_app import app, settings, task_name
from tasks.execution import sync_executor


@app.task(name=task_name(Queue.ADVANTAGES), pydantic=True)
def run(job: AdvantageJob) -> None:
    sync_executor().execute(job, lambda _: body(job, settings()))


def body(job: AdvantageJob, config: RunConfig) -> AdvantageResult:
    plan = job_inputs.read_group(config.store_dir, job.plan)
    if hooks := noop_settings(config, plan.environment):
        return noop.advantages(job, plan, hooks)
    return estimate(plan, config)


def estimate(plan: GroupInputs, config: RunConfig) -> AdvantageResult:
    recipe = resolve(config.advantages, group_size=config.rollouts.group_size)
    results = [member.result for member in plan.members]
    rewards = np.array([result.reward for result in results], np.float64)
    group = GroupValues(
        rewards=rewards,
        completion_tokens=np.array([result.completion_tokens for result in results], np.int64),
        tool_tokens=np.array([result.tool_tokens for result in results], np.int64),
        input_tokens=np.array([result.prompt_tokens for result in results], np.int64),
        turns=np.array([result.turns for result in results], np.int64),
    )
    advantages = group_phase(group, recipe)
    filters = group_filters(config.filters, needs_variance=recipe.needs_variance)
    verdict = judge_group(GroupRewards(rewards=rewards, shaped=advantages.shaped), filters)
    rollouts = (member.rollout for member in plan.members)
    return AdvantageResult(
        advantages=dict(zip(rollouts, advantages.values.tolist(), strict=True)),
        dropped=verdict.drop_reason,
        masked=verdict.masked,
    )
