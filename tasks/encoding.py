"""The queue `encoding`: one data rank's file of one step. Runs on prefork."""

from penstock import job_inputs
from penstock.batches.writer import encode_rank
from penstock.config import RunConfig
from penstock.config.test_hooks import noop_settings
from penstock.errors import BlobCorrupt, BlobMissing
from penstock.messages import UNREADABLE_LIMIT, EncodeJob, EncodeResult, Queue
from penstock.store import BlobRef, Store
from penstock.store.columns import read_columns
from tasks import noop
from tasks.celery_app import app, settings, task_name
from tasks.execution import sync_executor


@app.task(name=task_name(Queue.ENCODING), pydantic=True)
def run(job: EncodeJob) -> None:
    sync_executor().execute(job, lambda execution: body(job, settings(), execution))


def body(job: EncodeJob, config: RunConfig, execution: str) -> EncodeResult:
    plan = job_inputs.read_step(config.store_dir, job.plan)
    if hooks := noop_settings(config, *plan.envs):
        return noop.encoding(job, plan, hooks)
    store = Store(config.store_dir)
    try:
        return EncodeResult(rank=encode_rank(store, plan, data_rank=job.data_rank, execution=execution))
    except (BlobMissing, BlobCorrupt):
        unreadable = [rollout.rollout for rollout in plan.rollouts if not _readable(store, rollout.columns)]
        if not unreadable:
            raise
        return EncodeResult(unreadable=tuple(unreadable[:UNREADABLE_LIMIT]))


def _readable(store: Store, columns: BlobRef) -> bool:
    try:
        read_columns(store, columns)
    except (BlobMissing, BlobCorrupt):
        return False
    return True
