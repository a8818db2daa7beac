"""The queue `encoding`: one data rank's file of one step. Runs on prefork."""

from penstock import plans
from penstock.batches import encode_rank
from penstock.blobs import Store
from penstock.config import RunConfig
from penstock.messages import EncodeJob, EncodeResult, Queue
from tasks import noop
from tasks.celery_app import app, task_name
from tasks.settings import settings
from tasks.stage_process import stage_process


@app.task(name=task_name(Queue.ENCODING), pydantic=True)
def run(job: EncodeJob) -> None:
    stage_process().execute(job, lambda execution: body(job, settings(), execution))


def body(job: EncodeJob, config: RunConfig, execution: str) -> EncodeResult:
    plan = plans.read_step(config.store_dir, job.plan)
    if all(noop.plays(environment, config) for environment in plan.envs):
        return noop.encoding(job, plan, config.noop)
    rank = encode_rank(Store(config.store_dir), plan, data_rank=job.data_rank, execution=execution)
    return EncodeResult(rank=rank)
