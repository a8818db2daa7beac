"""Celery tasks, one for each stage: those of the queue `rollouts` run on the asyncio pool, the others on prefork."""

from typing import TYPE_CHECKING, Any, NoReturn

from celery import Task

from headpond.broker.queues import Queue, WorkerKind
from headpond.errors import ConfigError
from headpond.tasks.celery_app import app
from headpond.tasks.execution import AsyncExecutor, sync_executor
from headpond.tasks.stage import all_stages

if TYPE_CHECKING:  # every process declares the tasks; only rollout workers load environments and engine client
    from headpond.tasks.player import Player

# Set by `workers/rollouts.py` before the first job: the executor, and the worker's environments with
# its engine client.
executor: AsyncExecutor | None = None
player: "Player | None" = None


class CoroutineTask(Task):
    """The asyncio pool calls `run`. Other pools call the task, and would report the coroutine as a success."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(f"{self.name} runs on the asyncio pool: {WorkerKind.ROLLOUTS.command}")


def declare(name: str) -> None:
    """Declare the Celery task of the stage. Its entry in the registry is read for every job."""
    stage = all_stages()[name]

    async def run_on_the_loop(job: dict[str, Any]) -> None:
        assert executor is not None, "the asyncio pool sets it before the first job"
        await executor.execute(all_stages()[name], stage.message.model_validate(job), player)

    def run(job: dict[str, Any]) -> None:
        sync_executor().execute(all_stages()[name], stage.message.model_validate(job))

    if stage.queue is Queue.ROLLOUTS:
        app.task(name=stage.task, base=CoroutineTask)(run_on_the_loop)
    else:
        app.task(name=stage.task)(run)


for name in all_stages():
    declare(name)
