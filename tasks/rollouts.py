"""The queue `rollouts`: attempts of the policy at examples, scores of whole groups, sizes of environments.

Runs on the asyncio pool, because all three may wait for others.
"""

from typing import TYPE_CHECKING

from penstock.messages import Queue, RolloutJob, ScoreJob, SurveyJob
from tasks.celery_app import app, task_name

if TYPE_CHECKING:  # every process declares the tasks; only rollout workers load what plays them
    from tasks.execution import AsyncProcess
    from tasks.playing import Player

process: "AsyncProcess | None" = None
"""set by the worker before its first job: what its executions share"""
player: "Player | None" = None
"""likewise: the worker's environments and its line to the engine"""


@app.task(name=task_name(Queue.ROLLOUTS), pydantic=True)
async def run(job: RolloutJob) -> None:
    shared, own = _worker()
    await shared.execute(job, lambda execution: own.play(job, execution))


@app.task(name=task_name(Queue.ROLLOUTS, "score"), pydantic=True)
async def score(job: ScoreJob) -> None:
    shared, own = _worker()
    await shared.execute(job, lambda _: own.score(job))


@app.task(name=task_name(Queue.ROLLOUTS, "survey"), pydantic=True)
async def survey(job: SurveyJob) -> None:
    shared, own = _worker()
    await shared.execute(job, lambda _: own.survey(job))


def _worker() -> "tuple[AsyncProcess, Player]":
    assert process is not None, "rollouts run on the asyncio pool: celery -A workers.rollouts worker -Q rollouts"
    assert player is not None
    return process, player
