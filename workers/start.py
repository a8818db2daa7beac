"""What both workers say when they start."""

import logging

from celery import Celery
from celery.signals import worker_ready

from penstock.config import DEFAULT_REDIS_URL
from tasks.celery_app import settings

logger = logging.getLogger("penstock.worker")


def announce(app: Celery) -> None:
    worker_ready.connect(_say, weak=False)


def _say(**_: object) -> None:
    config = settings()
    logger.info("action=worker_ready environments=%s store=%s", ",".join(sorted(config.environments)), config.store_dir)
    if config.redis_url == DEFAULT_REDIS_URL and config.store is None:
        logger.warning(
            "action=defaults nothing is configured: built-in environments, Redis at %s, store %s; "
            "set PENSTOCK_CONFIG, PENSTOCK_REDIS_URL or PENSTOCK_STORE to change that",
            DEFAULT_REDIS_URL,
            config.store_dir,
        )
