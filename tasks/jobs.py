"""The Celery tasks: what each queue runs. `rollouts` runs on the asyncio pool, the others on prefork.

Tasks of `rollouts` call the worker's player. The others read the file that their job names and call the stage that
makes its result.
"""

from typing import TYPE_CHECKING, NoReturn

from celery import Task

from headpond import job_inputs
from headpond.config import RunConfig
from headpond.config.test_hooks import noop_settings
from headpond.errors import ConfigError
from headpond.messages import (
    AdvantageJob,
    AdvantageResult,
    BatchPhaseJob,
    BatchPhaseResult,
    DrawJob,
    EncodeJob,
    EncodeResult,
    FilterJob,
    FilterResult,
    Queue,
    RolloutJob,
    ScoreJob,
    SurveyJob,
)
from headpond.queues import WorkerKind
from headpond.stages import draw_examples, encode, estimate_group, estimate_step, filter_group
from headpond.store import open_store
from headpond.tasks import noop
from headpond.tasks.celery_app import app, settings, task_name
from headpond.tasks.execution import AsyncExecutor, sync_executor

if TYPE_CHECKING:  # every process declares the tasks; only rollout workers load environments and engine client
    from headpond.tasks.player import Player

executor: AsyncExecutor | None = None
"""Set by the worker before its first job."""
player: "Player | None" = None
"""Set by the worker before its first job: its environments and engine client."""


class CoroutineTask(Task):
    """The asyncio pool calls `run`. Other pools call the task, and would report the coroutine as a success."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(f"{self.name} runs on the asyncio pool: {WorkerKind.ROLLOUTS.command}")


@app.task(name=task_name(Queue.ROLLOUTS), pydantic=True, base=CoroutineTask)
async def play_rollout(job: RolloutJob) -> None:
    executor, player = _worker()
    await executor.execute(job, lambda execution: player.play(job, execution))


@app.task(name=task_name(Queue.ROLLOUTS, "score"), pydantic=True, base=CoroutineTask)
async def score_rollouts(job: ScoreJob) -> None:
    executor, player = _worker()
    await executor.execute(job, lambda _: player.score(job))


@app.task(name=task_name(Queue.ROLLOUTS, "survey"), pydantic=True, base=CoroutineTask)
async def survey_environment(job: SurveyJob) -> None:
    executor, player = _worker()
    await executor.execute(job, lambda _: player.survey(job))


def _worker() -> "tuple[AsyncExecutor, Player]":
    assert executor is not None, "the asyncio pool sets it before the first job"
    assert player is not None
    return executor, player


@app.task(name=task_name(Queue.FILTERING), pydantic=True)
def filter_rollouts(job: FilterJob) -> None:
    sync_executor().execute(job, lambda _: filter_body(job, settings()))


def filter_body(job: FilterJob, config: RunConfig) -> FilterResult:
    group = job_inputs.read_group(open_store(config.store_url), job.plan)
    if hooks := noop_settings(config, group.environment):
        return noop.filtering(job, group, hooks)
    return filter_group(open_store(config.store_url), group, config, retried=job.attempt > 1)


@app.task(name=task_name(Queue.ADVANTAGES), pydantic=True)
def estimate_advantages(job: AdvantageJob) -> None:
    sync_executor().execute(job, lambda execution: advantage_body(job, settings(), execution))


def advantage_body(job: AdvantageJob, config: RunConfig, execution: str) -> AdvantageResult:
    store = open_store(config.store_url)
    group = job_inputs.read_group(store, job.plan)
    if hooks := noop_settings(config, group.environment):
        return noop.advantages(job, group, hooks)
    return estimate_group(store, group, config, execution=execution)


@app.task(name=task_name(Queue.ADVANTAGES, "batch"), pydantic=True)
def estimate_batch(job: BatchPhaseJob) -> None:
    sync_executor().execute(job, lambda execution: batch_body(job, settings(), execution))


def batch_body(job: BatchPhaseJob, config: RunConfig, execution: str) -> BatchPhaseResult:
    store = open_store(config.store_url)
    values = job_inputs.read_values(store, job.plan)
    if hooks := noop_settings(config, *set(values.environments)):
        noop.work(job, hooks)
    key = job_inputs.advantages_key(job.run, job.step, job.formation, execution)
    credit = job_inputs.step_credit_key(job.run, job.step, job.formation, execution)
    job_inputs.write(store, key, estimate_step(store, values, config, credit=credit))
    return BatchPhaseResult(execution=execution)


@app.task(name=task_name(Queue.ENCODING), pydantic=True)
def encode_batch(job: EncodeJob) -> None:
    sync_executor().execute(job, lambda execution: encode_body(job, settings(), execution))


def encode_body(job: EncodeJob, config: RunConfig, execution: str) -> EncodeResult:
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


@app.task(name=task_name(Queue.ADVANTAGES, "draw"), pydantic=True)
def draw_next(job: DrawJob) -> None:
    store, config = open_store(settings().store_url), settings()
    sync_executor().execute(job, lambda _: draw_examples(job_inputs.read_draw(store, job.plan), config))
