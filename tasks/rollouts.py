"""The queue `rollouts`: rollouts, scores of whole groups, and surveys of environments. Runs on the asyncio pool."""

from typing import TYPE_CHECKING, NoReturn

from celery import Task

from penstock.errors import ConfigError
from penstock.messages import Queue, RolloutJob, ScoreJob, SurveyJob
from penstock.queues import WorkerKind
from tasks.celery_app import app, task_name

if TYPE_CHECKING:  # every process declares the tasks; only rollout workers load environments and engine client
    from tasks.execution import AsyncExecutor
    from tasks.player import Player

executor: "AsyncExecutor | None" = None
"""Set by the worker before its first job."""
player: "Player | None" = None
"""Set by the worker before its first job: its environments and engine client."""


class CoroutineTask(Task):
    """The asyncio pool calls `run`. Other pools call the task, and would report the coroutine as a success."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(f"{self.name} runs on the asyncio pool: {WorkerKind.ROLLOUTS.command}")


@app.task(name=task_name(Queue.ROLLOUTS), pydantic=True, base=CoroutineTask)
async def run(job: RolloutJob) -> None:
    executor, player = _worker()
    await executor.execute(job, lambda execution: player.play(job, execution))


@app.task(name=task_name(Queue.ROLLOUTS, "score"), pydantic=True, base=CoroutineTask)
async def score(job: ScoreJob) -> None:
    executor, player = _worker()
    await executor.execute(job, lambda _: player.score(job))


@app.task(name=task_name(Queue.ROLLOUTS, "survey"), pydantic=True, base=CoroutineTask)
async def survey(job: SurveyJob) -> None:
    executor, player = _worker()
    await executor.execute(job, lambda _: player.survey(job))


def _worker() -> "tuple[AsyncExecutor, Player]":
    assert executor is not None, "the asyncio pool sets it before the first job"
    assert player is not None
    return executor, player
