"""The queue `encoding`: one data rank's file of one step. Runs on prefork."""

from penstock import plans
from penstock.messages import EncodeJob, Queue, StepPlan
from tasks import noop
from tasks.celery_app import app, task_name
from tasks.settings import settings
from tasks.stage_process import stage_process


@app.task(name=task_name(Queue.ENCODING), pydantic=True)
def run(job: EncodeJob) -> None:
    config = settings()
    stage_process().execute(
        job, lambda: noop.encoding(job, plans.read(config.store_dir, job.plan, StepPlan), config.noop)
    )
