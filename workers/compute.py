"""The compute worker: `celery -A headpond.workers.compute worker -Q filtering,advantages,encoding -c 4`. Prefork."""

from celery.signals import worker_init

from headpond.broker.queues import WorkerKind
from headpond.config.named_rules import import_rules
from headpond.errors import ConfigError
from headpond.tasks import app
from headpond.tasks.celery_app import settings
from headpond.workers.start import set_up

__all__ = ["app"]

set_up(app, WorkerKind.COMPUTE, pool="celery.concurrency.prefork:TaskPool")


@worker_init.connect
def _import_rules(**_: object) -> None:
    """Import the rules before the children are forked: a wrong name is refused once, at start."""
    try:
        import_rules(settings())
    except ConfigError as error:
        raise SystemExit(f"headpond: {error}") from error
