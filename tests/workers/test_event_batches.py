from types import SimpleNamespace
from typing import Any

from celery import Celery
from kombu.asynchronous.hub import Hub
from kombu.asynchronous.timer import Timer

from headpond.workers.celery_changes import EventBatches


class Dispatcher:
    def __init__(self) -> None:
        self.on_send_buffered: Any = lambda: None
        self.flushed = 0

    def flush(self) -> None:
        self.flushed += 1


def consumer() -> Any:
    return SimpleNamespace(event_dispatcher=Dispatcher(), hub=Hub(timer=Timer()))


def test_events_wait_for_the_next_flush() -> None:
    parent = consumer()
    EventBatches(parent).start(parent)
    for flushed in (1, 2):
        parent.event_dispatcher.on_send_buffered()
        parent.event_dispatcher.on_send_buffered()
        (due,) = parent.hub.timer.queue
        due.entry()
        assert parent.event_dispatcher.flushed == flushed
        parent.hub.timer.clear()


def test_a_new_dispatcher_is_flushed_and_the_last_events_are_sent_at_stop() -> None:
    parent = consumer()
    step = EventBatches(parent)
    step.start(parent)
    parent.event_dispatcher.on_send_buffered()
    parent.hub.timer.clear()  # as a reset of the connection does
    parent.event_dispatcher = Dispatcher()
    step.start(parent)
    parent.event_dispatcher.on_send_buffered()
    assert len(parent.hub.timer.queue) == 1
    step.stop(parent)
    assert parent.event_dispatcher.flushed == 1


def test_celerys_dispatcher_calls_on_send_buffered() -> None:
    app = Celery("contract", broker="memory://", set_as_current=False)
    calls: list[bool] = []
    with app.connection_for_write() as connection:
        dispatcher = app.events.Dispatcher(connection, buffer_group=["task"], on_send_buffered=print)
        dispatcher.on_send_buffered = lambda: calls.append(True)
        dispatcher.send("task-started", uuid="a")
    assert calls, "EventDispatcher no longer calls on_send_buffered: workers/celery_changes.py has no effect"
