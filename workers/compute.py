"""The compute worker: `celery -A workers.compute worker -Q filtering,advantages,encoding -c 4`. Prefork."""

from celery.signals import worker_init

from penstock.config.rules import import_rules
from penstock.errors import ConfigError
from penstock.queues import WorkerKind
from tasks import app
from tasks.celery_app import settings
from workers.start import set_up

__all__ = ["app"]

set_up(app, WorkerKind.COMPUTE, pool="celery.concurrency.prefork:TaskPool")


@worker_init.connect
def _import_rules(**_: object) -> None:
    """Before the children are forked: a wrong name is refused once, at start."""
    try:
        import_rules(settings())
    except ConfigError as error:
        raise SystemExit(f"penstock: {error}") from error
