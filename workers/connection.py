"""A worker waits for a Redis that is away or full, and logs it.

Celery publishes heartbeats, the search for other workers and the answers of remote control with kombu's retry, on the
thread that takes messages. By default that retries for ever, logs nothing and ignores SIGTERM. Without it the error
reaches Celery's own reconnection, which logs it, obeys signals, and sends the events that were kept.
"""

from collections.abc import Callable
from typing import Any

from kombu import Connection
from kombu.exceptions import OperationalError
from kombu.transport.redis import Transport
from redis.exceptions import OutOfMemoryError

_ensure: Callable[..., Callable[..., Any]] = Connection.ensure


def _ensure_bounded(
    self: Connection, obj: Any, fun: Callable[..., Any], errback: Any = None, max_retries: int | None = None,
    *options: Any, **more: Any,
) -> Callable[..., Any]:  # fmt: skip
    return fun if max_retries is None else _ensure(self, obj, fun, errback, max_retries, *options, **more)


def install() -> None:
    """For every connection of the process: those of kombu's pools are of another class than those of the app."""
    Connection.ensure = _ensure_bounded
    # Celery waits for a Redis that is away, and ends a worker that cannot declare its queues because Redis is full, or
    # whose further connections find none: kombu renames the error of these.
    Transport.connection_errors = (*Transport.connection_errors, OutOfMemoryError, OperationalError)
