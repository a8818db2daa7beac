"""The Celery app: explicit task names, four queues, JSON only, early acknowledgement, no result backend.

Lost messages are detected by leases (`leases.py`) and the orchestrator, so a broker connection that resets repeats
nothing and a killed worker strands nothing: docs/decisions.md, "Early acknowledgement".
"""

import functools
from typing import Any

import kombu
import orjson
from celery import Celery
from celery.signals import celeryd_init
from kombu.serialization import register

from headpond import config
from headpond.broker.queues import Queue, WorkerKind
from headpond.config import redis_address
from headpond.errors import ConfigError

CONTENT_TYPE = "application/x-orjson"
# kombu's default never times out on a half-open connection. Must exceed its BRPOP, which blocks
# for seconds.
SOCKET_TIMEOUT_S = 30


@functools.cache
def settings() -> config.RunConfig:
    """The configuration of this process, read once from its own environment, never from a message."""
    try:
        return config.load(None)
    except ConfigError as error:
        raise SystemExit(f"headpond: {error}") from error


def _dumps(value: object) -> str:
    return orjson.dumps(value).decode()


register("orjson", _dumps, orjson.loads, CONTENT_TYPE, "utf-8")


def broker_settings(redis_url: str) -> dict[str, Any]:
    broker = redis_address.celery_settings(redis_url)
    broker["broker_transport_options"] |= {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "body_encoding": "utf-8",
        # Delivered messages that have not started are in the worker only: leases detect those that a kill loses.
        "ack_emulation": False,
    }
    return broker


def _configuration() -> dict[str, Any]:
    return {
        **broker_settings(settings().redis_url),
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "task_serializer": "orjson",
        "accept_content": ["orjson", "json"],  # remote control uses `json`
        "task_ignore_result": True,
        "task_acks_late": False,
        "worker_disable_prefetch": True,
        "worker_prefetch_multiplier": 1,
        # A message that a rate limit holds back in the worker has no lease and looks lost.
        "worker_disable_rate_limits": True,
        "task_queues": [kombu.Queue(name.value, kombu.Exchange(name.value), routing_key=name.value) for name in Queue],
        "task_routes": {f"headpond.{name.value}.*": {"queue": name.value} for name in Queue},
        "task_default_queue": Queue.ROLLOUTS.value,
        "task_create_missing_queues": False,
        "worker_send_task_events": True,
        "worker_hijack_root_logger": True,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_proc_alive_timeout": 30.0,
    }


app = Celery("headpond")
app.add_defaults(_configuration)
# of this process, if it is a worker: set by `headpond.workers.start`
kind: WorkerKind | None = None


@celeryd_init.connect
def _refuse_to_be_a_worker(instance: Any, options: dict[str, Any], **_: object) -> None:
    """`celery -A headpond.tasks worker` has neither the asyncio pool nor the start-up of a worker."""
    if kind is None and instance.app is app:
        kinds = {WorkerKind.of(Queue(queue)) for queue in options.get("queues") or Queue if queue in list(Queue)}
        commands = " and ".join(each.command for each in sorted(kinds or WorkerKind, reverse=True))
        raise SystemExit(
            f"headpond: `headpond.tasks` is the app of Flower and of remote control. Start a worker with {commands}"
        )
