"""The queue `filtering`. Runs on prefork."""

from penstock import job_inputs
from penstock.config import RunConfig
from penstock.config.test_hooks import noop_settings
from penstock.messages import FilterJob, FilterResult, Queue
from penstock.stages.filtering import filter_group
from penstock.store import open_store
from tasks import noop
from tasks.celery_app import app, settings, task_name
from tasks.execution import sync_executor


@app.task(name=task_name(Queue.FILTERING), pydantic=True)
def run(job: FilterJob) -> None:
    sync_executor().execute(job, lambda _: body(job, settings()))


def body(job: FilterJob, config: RunConfig) -> FilterResult:
    group = job_inputs.read_group(open_store(config.store_url), job.plan)
    if hooks := noop_settings(config, group.environment):
        return noop.filtering(job, group, hooks)
    return filter_group(open_store(config.store_url), group, config, retried=job.attempt > 1)
