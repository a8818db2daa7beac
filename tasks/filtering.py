"""The queue `filtering`: token filters over one group. Runs on prefork."""

from penstock import plans
from penstock.messages import FilterJob, GroupPlan, Queue
from tasks import noop
from tasks.celery_app import app, task_name
from tasks.settings import settings
from tasks.stage_process import stage_process


@app.task(name=task_name(Queue.FILTERING), pydantic=True)
def run(job: FilterJob) -> None:
    config = settings()
    stage_process().execute(
        job, lambda: noop.filtering(job, plans.read(config.store_dir, job.plan, GroupPlan), config.noop)
    )
