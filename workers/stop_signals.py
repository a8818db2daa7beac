"""What SIGTERM, SIGINT and SIGQUIT mean to a worker: the first asks it to drain, a second one (or SIGQUIT) to stop.

A handler here only sets Celery's own flags, which Celery's loop and the pool's drain look at. Celery's handlers do the
whole cold stop inside the handler: they publish events and talk to Redis over whatever the signal interrupted, and hang
when that was a publish holding the event dispatcher's lock; and they ignore a second SIGTERM.
"""

import os
import signal
from contextlib import suppress
from types import FrameType

from celery.platforms import EX_FAILURE, EX_OK
from celery.worker import state

DRAIN, STOP = (signal.SIGTERM, signal.SIGINT), signal.SIGQUIT


def install() -> None:
    for number in (*DRAIN, STOP):
        signal.signal(number, _on_signal)


def stop_asked() -> bool:
    return state.should_terminate is not None


def _on_signal(number: int, _frame: FrameType | None) -> None:
    if number == STOP or state.should_stop is not None:
        state.should_terminate = EX_FAILURE
        _say("stopping: running tasks are cancelled")
    else:
        state.should_stop = EX_OK
        _say("draining: running tasks finish, no new ones start; signal again to stop now")


def _say(text: str) -> None:
    # Neither print nor logging may run in a handler: the signal may have interrupted them. Nor may it raise.
    with suppress(OSError):
        os.write(2, f"worker: {text}\n".encode())
