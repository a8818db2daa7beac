"""The log lines of a worker that has started."""

import logging

from celery import Celery
from celery.signals import worker_ready

from penstock.config import DEFAULT_REDIS_URL
from tasks.celery_app import settings

logger = logging.getLogger("penstock.worker")


def announce(app: Celery) -> None:
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
