"""Celery as it comes, with a task that does nothing: what one message costs before Penstock adds anything.

Prefork, late acknowledgement (so that a killed worker loses nothing, if much later), no results, events on.
"""

import time

from celery import Celery
from redis import Redis

from bench.processes import POLL_S
from penstock.errors import RunError

app = Celery("stock")
app.conf.update(task_ignore_result=True, task_acks_late=True, worker_send_task_events=True)

NOOP = "noop"
QUEUE, STAGED, UNACKED = "celery", "staged", "unacked"
PATIENCE_S = 120.0


@app.task(name=NOOP)
def noop() -> None: ...


def stage(broker_url: str, messages: int) -> None:
    """Publish to a queue that no worker reads."""
    with app.connection_for_write(broker_url) as connection, app.amqp.Producer(connection) as producer:
        for _ in range(messages):
            app.send_task(NOOP, producer=producer, queue=STAGED)


def work_off(broker_url: str) -> float:
    """Give the worker all that was staged at once; the seconds until the last message is acknowledged."""
    with Redis.from_url(broker_url) as client:
        client.rename(STAGED, QUEUE)
        started = time.monotonic()
        while client.llen(QUEUE) or client.hlen(UNACKED):
            if time.monotonic() - started > PATIENCE_S:
                raise RunError(f"the stock worker has {client.llen(QUEUE)} messages left after {PATIENCE_S:g} s")
            time.sleep(POLL_S)
        return time.monotonic() - started
