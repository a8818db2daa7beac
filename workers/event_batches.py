"""Task events leave a worker together, a few times a second.

Celery gathers them only until its hub turns round, that is for one message: a new Redis client and a round trip for
two or three events, a fifth of what a no-op rollout cost its worker.
"""

from functools import partial
from typing import Any

from celery import Celery, bootsteps
from celery.worker.consumer.events import Events

FLUSH_EVERY_S = 0.2  # a monitor shows what happened this long ago; Celery flushes earlier when 24 events have gathered


class EventBatches(bootsteps.StartStopStep):
    """Started again after every reconnection, which makes a new dispatcher."""

    requires = (Events,)

    def start(self, parent: Any) -> None:
        self._due = False
        if parent.event_dispatcher.on_send_buffered:  # else this worker has no hub, and gathers nothing
            parent.event_dispatcher.on_send_buffered = partial(self._flush_soon, parent)

    def stop(self, parent: Any) -> None:
        """The hub turns no more: what ends while the pool drains is told at once."""
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


def install(app: Celery) -> None:
    assert app.steps is not None
    app.steps["consumer"].add(EventBatches)
