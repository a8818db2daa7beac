"""The queue `filtering`: token filters over one group, and its blobs made durable. Runs on prefork."""

from penstock import plans
from penstock.blobs import Store
from penstock.blobs.columns import read_columns
from penstock.config import RunConfig
from penstock.filters import RolloutTokens, count, judge, rollout_filters
from penstock.messages import FilterJob, FilterResult, GroupPlan, Queue, RolloutResult
from tasks import noop
from tasks.celery_app import app, task_name
from tasks.settings import settings
from tasks.stage_process import stage_process


@app.task(name=task_name(Queue.FILTERING), pydantic=True)
def run(job: FilterJob) -> None:
    stage_process().execute(job, lambda _: body(job, settings()))


def body(job: FilterJob, config: RunConfig) -> FilterResult:
    plan = plans.read_group(config.store_dir, job.plan)
    if noop.plays(plan.environment, config):
        return noop.filtering(job, plan, config.noop)
    return filter_group(Store(config.store_dir), plan, config)


def filter_group(store: Store, plan: GroupPlan, config: RunConfig) -> FilterResult:
    filters = rollout_filters(config.filters, vocab_size=config.vocab_size)
    played = [member for member in plan.members if member.result.columns]
    tokens = {member.rollout: _tokens(store, member.result, plan.policy_version) for member in played}
    verdicts = {rollout: judge(each, filters) for rollout, each in tokens.items()}
    blobs = [blob for member in plan.members for blob in (member.result.columns, member.result.experts) if blob]
    store.sync([blob.key for blob in blobs])  # here, off the step boundary
    dropped = {rollout: reason for rollout, verdict in verdicts.items() if (reason := verdict.drop_reason)}
    # Spoilt before the engine's first answer: its reward counts in the baseline, there is nothing to train on.
    dropped |= {member.rollout: "nothing_to_train" for member in plan.members if member.result.columns is None}
    return FilterResult(
        dropped=dropped,
        masked=tuple(rollout for rollout, verdict in verdicts.items() if verdict.masked),
        matched=dict(count(verdicts.values()).matched),
    )


def _tokens(store: Store, result: RolloutResult, policy_version: int) -> RolloutTokens:
    assert result.columns is not None
    columns = read_columns(store, result.columns)
    return RolloutTokens(
        input_ids=columns.input_ids,
        loss_mask=columns.loss_mask,
        logprobs=columns.logprobs,
        sample_offsets=columns.sample_offsets,
        truncated=columns.truncated,
        overlong_prompt=columns.overlong_prompt,
        version_first=result.version_first,
        version_now=policy_version,
    )
