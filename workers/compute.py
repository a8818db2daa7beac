"""The compute worker: `celery -A workers.compute worker -Q filtering,advantages,encoding -c 4`. Prefork."""

from tasks import app
from tasks.kinds import WorkerKind
from workers.start import set_up

__all__ = ["app"]

set_up(app, WorkerKind.COMPUTE, pool="celery.concurrency.prefork:TaskPool")
