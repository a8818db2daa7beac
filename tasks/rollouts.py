"""The queue `rollouts`: rollouts, scores of whole groups, and surveys of environments. Runs on the asyncio pool."""

from typing import TYPE_CHECKING

from penstock.messages import Queue, RolloutJob, ScoreJob, SurveyJob
from tasks.celery_app import app, task_name

if TYPE_CHECKING:  # every process declares the tasks; only rollout workers load environments and engine client
    from tasks.execution import AsyncExecutor
    from tasks.player import Player

executor: "AsyncExecutor | None" = None
"""Set by the worker before its first job."""
player: "Player | None" = None
"""Set by the worker before its first job: its environments and engine client."""


@app.task(name=task_name(Queue.ROLLOUTS), pydantic=True)
async def run(job: RolloutJob) -> None:
    executor, player = _worker()
    await executor.execute(job, lambda execution: player.play(job, execution))


@app.task(name=task_name(Queue.ROLLOUTS, "score"), pydantic=True)
async def score(job: ScoreJob) -> None:
    executor, player = _worker()
    await executor.execute(job, lambda _: player.score(job))


@app.task(name=task_name(Queue.ROLLOUTS, "survey"), pydantic=True)
async def survey(job: SurveyJob) -> None:
    executor, player = _worker()
    await executor.execute(job, lambda _: player.survey(job))


def _worker() -> "tuple[AsyncExecutor, Player]":
    assert executor is not None, "rollouts run on the asyncio pool: celery -A workers.rollouts worker -Q rollouts"
    assert player is not None
    return executor, player
