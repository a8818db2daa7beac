"""Baseline of `bench control`: an unmodified Celery worker with a no-op task.

Prefork pool, late acknowledgement (no message of a killed worker is lost, as in Headpond), no results, events on.
"""

import time

from celery import Celery
from redis import Redis

from headpond.errors import RunError
from headpond.processes.child_process import POLL_S

app = Celery("stock")
app.conf.update(task_ignore_result=True, task_acks_late=True, worker_send_task_events=True)

NOOP = "noop"
QUEUE, STAGED, UNACKED = "celery", "staged", "unacked"
TIMEOUT_S = 120.0


@app.task(name=NOOP)
def noop() -> None: ...


def stage(broker_url: str, messages: int) -> None:
    """Publish to a queue that no worker reads."""
    with app.connection_for_write(broker_url) as connection, app.amqp.Producer(connection) as producer:
        for _ in range(messages):
            app.send_task(NOOP, producer=producer, queue=STAGED)


def process_staged(broker_url: str) -> float:
    """Hand all staged messages to the worker at once. Returns the seconds until the last is acknowledged."""
    with Redis.from_url(broker_url) as client:
        client.rename(STAGED, QUEUE)
        started = time.monotonic()
        while client.llen(QUEUE) or client.hlen(UNACKED):
            if time.monotonic() - started > TIMEOUT_S:
                raise RunError(f"the stock worker has {client.llen(QUEUE)} messages left after {TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        return time.monotonic() - started
