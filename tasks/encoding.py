"""The queue `encoding`. Runs on prefork."""

from penstock import job_inputs
from penstock.config import RunConfig
from penstock.config.test_hooks import noop_settings
from penstock.messages import EncodeJob, EncodeResult, Queue
from penstock.stages.encoding import encode
from penstock.store import open_store
from tasks import noop
from tasks.celery_app import app, settings, task_name
from tasks.execution import sync_executor


@app.task(name=task_name(Queue.ENCODING), pydantic=True)
def run(job: EncodeJob) -> None:
    sync_executor().execute(job, lambda execution: body(job, settings(), execution))


def body(job: EncodeJob, config: RunConfig, execution: str) -> EncodeResult:
    plan = job_inputs.read_step(open_store(config.store_url), job.plan)
    if hooks := noop_settings(config, *plan.envs):
        return noop.encoding(job, plan, hooks, execution)
    return encode(
        open_store(config.store_url),
        plan,
        data_rank=job.data_rank,
        execution=execution,
        rollouts_jsonl=config.batch.rollouts_jsonl,
    )
