"""The queue `advantages`. Runs on prefork."""

from penstock import job_inputs
from penstock.config import RunConfig
from penstock.config.test_hooks import noop_settings
from penstock.messages import AdvantageJob, AdvantageResult, Queue
from penstock.stages.advantages import estimate_group
from penstock.store import open_store
from tasks import noop
from tasks.celery_app import app, settings, task_name
from tasks.execution import sync_executor


@app.task(name=task_name(Queue.ADVANTAGES), pydantic=True)
def run(job: AdvantageJob) -> None:
    sync_executor().execute(job, lambda _: body(job, settings()))


def body(job: AdvantageJob, config: RunConfig) -> AdvantageResult:
    group = job_inputs.read_group(open_store(config.store_url), job.plan)
    if hooks := noop_settings(config, group.environment):
        return noop.advantages(job, group, hooks)
    return estimate_group(group, config)
