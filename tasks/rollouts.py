"""The queue `rollouts`: one job is one attempt of the policy at one example. Runs on the asyncio pool."""

from collections.abc import Awaitable, Callable

from penstock.errors import StageError
from penstock.messages import Queue, RolloutJob, RolloutResult
from tasks import noop
from tasks.celery_app import app, task_name
from tasks.execution import AsyncProcess
from tasks.settings import settings

Body = Callable[[RolloutJob], Awaitable[RolloutResult]]
BODIES: dict[str, Body] = {"noop": lambda job: noop.rollout(job, settings().noop)}
"""environment -> what plays it: the worker's own, a message only names one"""

process: AsyncProcess | None = None
"""set by the worker before its first job: what its executions share"""


@app.task(name=task_name(Queue.ROLLOUTS), pydantic=True)
async def run(job: RolloutJob) -> None:
    assert process is not None, "rollouts run on the asyncio pool: celery -A workers.rollouts worker -Q rollouts"
    await process.execute(job, lambda: _body(job.environment)(job))


def _body(environment: str) -> Body:
    try:
        return BODIES[environment]
    except KeyError:
        known = ", ".join(sorted(BODIES))
        raise StageError(f"this worker has no environment {environment!r}; it has: {known}") from None
