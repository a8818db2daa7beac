"""The compute worker: `celery -A workers.compute worker -Q filtering,advantages,encoding -c 4`. Prefork."""

import signal
from types import FrameType
from typing import NoReturn

from celery.signals import worker_process_init

from tasks import app
from tasks.execution import WorkerStopping
from tasks.kinds import WorkerKind
from workers.start import set_up

__all__ = ["app"]

set_up(app, WorkerKind.COMPUTE, pool="celery.concurrency.prefork:TaskPool")


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise WorkerStopping("stopping")


@worker_process_init.connect
def _release_on_cold_stop(**_: object) -> None:
    """A cold stop sends SIGTERM to the children: the running job then replies `released`."""
    signal.signal(signal.SIGTERM, _stop)
