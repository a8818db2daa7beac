"""`python -m bench pool`: CPU time of a no-op task on the asyncio pool, against Celery's solo and prefork pools.

All workers have the same settings and send task events. The workers run `celery -A bench.pool:coroutines` (asyncio) or
`celery -A bench.pool:functions`.
"""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from bench.harness.procfs import cpu_s
from bench.harness.report import Report, Target, median
from headpond.processes.child_process import ChildProcess
from headpond.processes.embedded_redis import EmbeddedRedis

ROUNDS, TASKS = 5, 1_000
TIMEOUT_S = 120.0
QUEUE = "noop"
WORKERS = {
    "asyncio": ["coroutines", "-c", "256"],
    "solo": ["functions", "-P", "solo"],
    "prefork": ["functions", "-P", "prefork", "-c", "2"],
}
SETTINGS = {
    "task_ignore_result": True,
    "worker_disable_prefetch": True,
    "worker_send_task_events": True,
    "task_default_queue": QUEUE,
    "accept_content": ["json"],
    "broker_connection_retry_on_startup": True,
}

coroutines = Celery("coroutines", set_as_current=False)
coroutines.conf.update(SETTINGS, worker_pool="headpond.workers.asyncio_pool:AsyncioPool")
functions = Celery("functions", set_as_current=False)
functions.conf.update(SETTINGS)


@coroutines.task(name="noop", shared=False)
async def coroutine() -> None: ...


@functions.task(name="noop", shared=False)
def function() -> None: ...


def run(*, quick: bool) -> Report:
    rounds, tasks, pools = (1, 50, ["asyncio", "solo"]) if quick else (ROUNDS, TASKS, list(WORKERS))
    cpu_ms: dict[str, list[float]] = {pool: [] for pool in pools}
    with tempfile.TemporaryDirectory() as directory, EmbeddedRedis(Path(directory), appendonly=False) as server:
        for _ in range(rounds):
            for pool in pools:
                cpu_ms[pool].append(1e3 * spent_s(server.url, WORKERS[pool], tasks, Path(directory)) / tasks)
    ratio = median([ours / solo for ours, solo in zip(cpu_ms["asyncio"], cpu_ms["solo"], strict=True)])
    return Report(
        bench="pool",
        figures={f"{pool}, CPU ms a task": median(values) for pool, values in cpu_ms.items()},
        targets=[Target(name="asyncio / solo", value=ratio, limit=1.25)],
        rounds=rounds,
        quick=quick,
    )


def spent_s(url: str, options: list[str], tasks: int, directory: Path) -> float:
    """CPU time of one worker and its children for `tasks` messages, published while it is stopped."""
    app, *rest = options
    celery = ["celery", "-b", url, "-A", f"bench.pool:{app}", "worker", "-l", "INFO", *rest]
    worker = ChildProcess(
        "worker", [*celery, "--without-mingle", "--without-gossip"], directory=directory, variables={}
    )
    try:
        worker.wait_until(lambda: " ready." in worker.output, what="it is ready", timeout_s=TIMEOUT_S)
        os.kill(worker.pid, signal.SIGSTOP)
        publish(url, tasks)
        before = cpu_s(worker.pid)
        os.kill(worker.pid, signal.SIGCONT)
        worker.wait_until(
            lambda: worker.output.count(" succeeded in ") == tasks, what="all tasks have succeeded", timeout_s=TIMEOUT_S
        )
        return cpu_s(worker.pid) - before
    finally:
        worker.kill()
        redis.Redis.from_url(url).flushall()


def publish(url: str, tasks: int) -> None:
    task: Any = function
    with functions.connection_for_write(url) as connection, functions.amqp.Producer(connection) as producer:
        for _ in range(tasks):
            task.apply_async(producer=producer)
