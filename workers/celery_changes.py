"""Changes of workers to Celery: batches of task events, the retry of its connections, and remote control."""

from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps
from celery.worker.consumer.events import Events
from celery.worker.control import Panel
from kombu import Connection
from kombu.exceptions import OperationalError
from kombu.transport.redis import Transport
from redis.exceptions import OutOfMemoryError

from headpond.broker.queues import WorkerKind

NO_RATE_LIMITS = "Headpond's workers have no rate limits: set rollouts.max_in_flight, or -c of the worker"
FLUSH_EVERY_S = 0.2  # the delay of a monitor; Celery flushes earlier when 24 events are waiting


class EventBatches(bootsteps.StartStopStep):
    """Sends task events a few times a second. Started after every reconnection, which creates a new dispatcher.

    Celery batches them for one message only: a new Redis client and a round trip for two or three events took a fifth
    of a no-op rollout's CPU time.
    """

    requires = (Events,)

    def start(self, parent: Any) -> None:
        self._due = False
        if parent.event_dispatcher.on_send_buffered:  # else this worker has no hub, and no batches
            parent.event_dispatcher.on_send_buffered = partial(self._flush_soon, parent)

    def stop(self, parent: Any) -> None:
        """The hub has stopped: events of tasks that end while the pool drains are sent at once."""
        self._flush(parent)
        if parent.event_dispatcher:
            parent.event_dispatcher.on_send_buffered = parent.event_dispatcher.flush

    def _flush_soon(self, consumer: Any) -> None:
        if not self._due:
            self._due = True
            consumer.hub.call_later(FLUSH_EVERY_S, self._flush, consumer)

    def _flush(self, consumer: Any) -> None:
        self._due = False
        if consumer.event_dispatcher:
            consumer.event_dispatcher.flush()


_ensure: Callable[..., Callable[..., Any]] = Connection.ensure


def _ensure_bounded(
    self: Connection, obj: Any, fun: Callable[..., Any], errback: Any = None, max_retries: int | None = None,
    *options: Any, **more: Any,
) -> Callable[..., Any]:  # fmt: skip
    return fun if max_retries is None else _ensure(self, obj, fun, errback, max_retries, *options, **more)


def bound_retries() -> None:
    """Let every connection of the process raise where kombu would retry for ever, log nothing and ignore SIGTERM.

    Celery's own reconnection then logs the error, obeys signals, and sends the events that were kept.
    """
    Connection.ensure = _ensure_bounded
    # Celery waits for a Redis that is away, and ends a worker that cannot declare its queues because Redis is full, or
    # whose further connections find none: kombu renames the error of these.
    Transport.connection_errors = (*Transport.connection_errors, OutOfMemoryError, OperationalError)


def refuse_remote_control(kind: WorkerKind) -> None:
    """Refuse rate limits and queues of the other kind: their messages have no lease and look lost."""
    add_consumer: Callable[..., dict[str, Any]] = Panel.data["add_consumer"]

    def add_own_queue(state: Any, queue: str, **options: Any) -> dict[str, Any]:
        if queue not in kind.queues:
            return {"error": f"this worker serves only {', '.join(kind.queues)}; {queue} was not added"}
        return add_consumer(state, queue, **options)

    Panel.data["add_consumer"] = add_own_queue
    Panel.data["rate_limit"] = lambda state, **_: {"error": NO_RATE_LIMITS}
