"""CPU time of a no-op task on the asyncio pool, beside Celery's solo and prefork pools: same settings, events on.

`celery -A bench.pool:coroutines` and `celery -A bench.pool:functions` are the two apps that it starts.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from bench.report import Report, Target, median
from penstock.embedded_redis import EmbeddedRedis

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
coroutines.conf.update(SETTINGS, worker_pool="workers.asyncio_pool:AsyncioPool")
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
                cpu_ms[pool].append(1e3 * cpu_s(server.url, WORKERS[pool], tasks, Path(directory) / "log") / tasks)
    ratio = median([ours / solo for ours, solo in zip(cpu_ms["asyncio"], cpu_ms["solo"], strict=True)])
    return Report(
        bench="pool",
        figures={f"{pool}, CPU ms a task": median(values) for pool, values in cpu_ms.items()},
        targets=[Target(name="asyncio / solo", value=ratio, limit=1.25)],
        rounds=rounds,
        quick=quick,
    )


def cpu_s(url: str, options: list[str], tasks: int, log: Path) -> float:
    """CPU time of one worker and its children over `tasks` messages that wait when it wakes up."""
    app, *rest = options
    celery = [str(Path(sys.executable).parent / "celery"), "-b", url, "-A", f"bench.pool:{app}", "worker", "-l", "INFO"]
    command = [*celery, *rest, "--without-mingle", "--without-gossip"]
    with log.open("wb") as output:
        worker = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until(lambda: " ready." in log.read_text())
        worker.send_signal(signal.SIGSTOP)
        publish(url, tasks)
        before = spent_s(worker.pid)
        worker.send_signal(signal.SIGCONT)
        wait_until(lambda: log.read_text().count(" succeeded in ") == tasks)
        return spent_s(worker.pid) - before
    finally:
        worker.terminate()
        worker.wait(TIMEOUT_S)
        redis.Redis.from_url(url).flushall()


def publish(url: str, tasks: int) -> None:
    task: Any = function
    with functions.connection_for_write(url) as connection, functions.amqp.Producer(connection) as producer:
        for _ in range(tasks):
            task.apply_async(producer=producer)


def spent_s(pid: int) -> float:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") + sum(spent_s(int(child)) for child in children)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError(f"a worker took more than {TIMEOUT_S:g} s")
        time.sleep(0.05)
