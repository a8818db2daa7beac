"""Signal handlers of a worker: the first SIGTERM, SIGINT or SIGHUP drains it; a second one, or SIGQUIT, stops it.

The handlers only set Celery's own flags, which Celery's loop and the pool's drain check. Celery's own handlers perform
the whole cold stop inside the handler: they publish events and write to Redis, and hang if the signal interrupted a
publish that holds the event dispatcher's lock; and they ignore a second SIGTERM.
"""

import os
import signal
from contextlib import suppress
from types import FrameType

from celery.platforms import EX_FAILURE, EX_OK
from celery.worker import state

# Celery restarts itself at SIGHUP, which needs the variables that the worker has forgotten: it drains instead.
DRAIN, STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), signal.SIGQUIT


def install() -> None:
    for number in (*DRAIN, STOP):
        signal.signal(number, _on_signal)


def stop_requested() -> bool:
    return state.should_terminate is not None


def _on_signal(number: int, _frame: FrameType | None) -> None:
    if number == STOP or state.should_stop is not None:
        state.should_terminate = EX_FAILURE
        _print("stopping: running tasks are cancelled")
    else:
        state.should_stop = EX_OK
        _print("draining: running tasks finish, no new ones start; signal again to stop now")


def _print(text: str) -> None:
    # print and logging are not reentrant, and the signal may have interrupted them. A handler must not raise.
    with suppress(OSError):
        os.write(2, f"worker: {text}\n".encode())
