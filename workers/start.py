"""Sets up both worker apps before `celery worker` starts them: their queues, their names, refusals."""

import logging
import os
import socket
from typing import Any

import click
from celery import Celery
from celery.signals import celeryd_init, worker_ready
from click.core import ParameterSource

from headpond.broker.queues import Queue, WorkerKind
from headpond.config import DEFAULT_REDIS_URL
from headpond.processes import privacy
from headpond.store import open_store
from headpond.tasks import agreement, celery_app
from headpond.tasks.celery_app import settings
from headpond.workers import celery_changes
from headpond.workers.admission import AdmissionStep
from headpond.workers.celery_changes import EventBatches

logger = logging.getLogger("headpond.worker")


def set_up(app: Celery, kind: WorkerKind, pool: str) -> None:
    """Serve the queues of `kind` on `pool`, send task events in batches, log the configuration when ready."""
    celery_app.kind = kind
    app.conf.worker_pool = pool
    app.conf.task_queues = [queue for queue in app.conf.task_queues if queue.name in kind.queues]
    celery_changes.bound_retries()
    celery_changes.refuse_remote_control(kind)
    AdmissionStep.kind = kind
    assert app.steps is not None
    app.steps["consumer"] |= {EventBatches, AdmissionStep}

    def check_and_name(instance: Any, options: dict[str, Any], **_: object) -> None:
        _refuse_other_queues(kind, options.get("queues") or [])
        _refuse_other_pool(kind, pool, options["pool"])
        if not _named_by_user():
            instance.hostname = f"{kind}-{os.getpid()}@{socket.gethostname()}"
        agreement.node = instance.hostname
        _hide_secrets(kind)

    celeryd_init.connect(check_and_name, weak=False)
    worker_ready.connect(_log_configuration, weak=False)


def _hide_secrets(kind: WorkerKind) -> None:
    """Agents' programs run as children of rollout workers, by default as the same user."""
    settings()
    privacy.forbid_inspection()
    if kind is WorkerKind.ROLLOUTS:
        privacy.forget_variables()


def _refuse_other_queues(kind: WorkerKind, queues: list[str]) -> None:
    for queue in queues:
        if queue not in kind.queues:
            known = queue in list(Queue)
            command = (WorkerKind.of(Queue(queue)) if known else kind).command
            raise SystemExit(
                f"headpond: headpond.workers.{kind} serves {', '.join(kind.queues)}, not {queue}. "
                f"{'That queue needs its own worker' if known else 'Start it with its own queues'}: {command}"
            )


def _refuse_other_pool(kind: WorkerKind, pool: str, chosen: Any) -> None:
    """A pool that does not await coroutines reports them as succeeded and plays nothing."""
    module, _, name = pool.partition(":")
    if (chosen.__module__, chosen.__name__) != (module, name):
        raise SystemExit(
            f"headpond: headpond.workers.{kind} runs on its own pool, not on {chosen.__module__}. Start it without -P: "
            f"{kind.command}"
        )


def _named_by_user() -> bool:
    context = click.get_current_context(silent=True)
    return context is None or context.get_parameter_source("hostname") is not ParameterSource.DEFAULT


def _log_configuration(**_: object) -> None:
    config = settings()
    environments = ",".join(sorted(config.environments)) or "built-in"
    store = open_store(config.store_url)
    logger.info("action=worker_ready environments=%s store=%s", environments, store)
    if config.redis_url == DEFAULT_REDIS_URL and config.store is None:
        logger.warning(
            "action=defaults neither Redis nor store is configured: using %s and %s; "
            "set HEADPOND_CONFIG, HEADPOND_REDIS_URL or HEADPOND_STORE to change that",
            DEFAULT_REDIS_URL,
            store,
        )
