"""What both worker apps set up before `celery worker` starts them."""

import logging

from celery import Celery
from celery.signals import worker_ready

from penstock.config import DEFAULT_REDIS_URL
from tasks.celery_app import settings
from workers import event_batches

logger = logging.getLogger("penstock.worker")


def set_up(app: Celery) -> None:
    """Send task events in batches, and log the configuration when the worker is ready."""
    event_batches.install(app)
    worker_ready.connect(_log_configuration, weak=False)


def _log_configuration(**_: object) -> None:
    config = settings()
    environments = ",".join(sorted(config.environments)) or "built-in"
    logger.info("action=worker_ready environments=%s store=%s", environments, config.store_dir)
    if config.redis_url == DEFAULT_REDIS_URL and config.store is None:
        logger.warning(
            "action=defaults neither Redis nor store is configured: using %s and %s; "
            "set PENSTOCK_CONFIG, PENSTOCK_REDIS_URL or PENSTOCK_STORE to change that",
            DEFAULT_REDIS_URL,
            config.store_dir,
        )
