"""The queue `advantages`: the estimator's group phase, its batch phase over a step, and samplers' draws. Prefork."""

from penstock import job_inputs
from penstock.config import RunConfig
from penstock.config.test_hooks import noop_settings
from penstock.messages import AdvantageJob, AdvantageResult, BatchPhaseJob, BatchPhaseResult, DrawJob, Queue
from penstock.stages.advantages import estimate_group, estimate_step
from penstock.stages.drawing import draw_examples
from penstock.store import open_store
from tasks import noop
from tasks.celery_app import app, settings, task_name
from tasks.execution import sync_executor


@app.task(name=task_name(Queue.ADVANTAGES), pydantic=True)
def run(job: AdvantageJob) -> None:
    sync_executor().execute(job, lambda execution: body(job, settings(), execution))


@app.task(name=task_name(Queue.ADVANTAGES, "batch"), pydantic=True)
def batch(job: BatchPhaseJob) -> None:
    sync_executor().execute(job, lambda execution: batch_body(job, settings(), execution))


@app.task(name=task_name(Queue.ADVANTAGES, "draw"), pydantic=True)
def draw(job: DrawJob) -> None:
    store, config = open_store(settings().store_url), settings()
    sync_executor().execute(job, lambda _: draw_examples(job_inputs.read_draw(store, job.plan), config))


def body(job: AdvantageJob, config: RunConfig, execution: str) -> AdvantageResult:
    store = open_store(config.store_url)
    group = job_inputs.read_group(store, job.plan)
    if hooks := noop_settings(config, group.environment):
        return noop.advantages(job, group, hooks)
    return estimate_group(store, group, config, execution=execution)


def batch_body(job: BatchPhaseJob, config: RunConfig, execution: str) -> BatchPhaseResult:
    store = open_store(config.store_url)
    values = job_inputs.read_values(store, job.plan)
    if hooks := noop_settings(config, *set(values.environments)):
        noop.work(job, hooks)
    key = job_inputs.advantages_key(job.run, job.step, job.formation, execution)
    credit = job_inputs.step_credit_key(job.run, job.step, job.formation, execution)
    job_inputs.write(store, key, estimate_step(store, values, config, credit=credit))
    return BatchPhaseResult(execution=execution)
