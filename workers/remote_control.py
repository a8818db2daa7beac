"""Celery's remote control commands that would hold or swallow jobs answer with what to do instead.

A message that a rate limit holds back, or that a worker of the other kind takes, has no lease and looks lost.
"""

from collections.abc import Callable
from typing import Any

from celery.worker.control import Panel

from headpond.queues import WorkerKind

NO_RATE_LIMITS = "Headpond's workers have no rate limits: set rollouts.max_in_flight, or -c of the worker"


def install(kind: WorkerKind) -> None:
    add_consumer: Callable[..., dict[str, Any]] = Panel.data["add_consumer"]

    def add_own_queue(state: Any, queue: str, **options: Any) -> dict[str, Any]:
        if queue not in kind.queues:
            return {"error": f"this worker serves only {', '.join(kind.queues)}; {queue} was not added"}
        return add_consumer(state, queue, **options)

    Panel.data["add_consumer"] = add_own_queue
    Panel.data["rate_limit"] = _refuse_rate_limit


def _refuse_rate_limit(state: Any, **_: object) -> dict[str, Any]:
    return {"error": NO_RATE_LIMITS}
