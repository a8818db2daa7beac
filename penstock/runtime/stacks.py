"""`kill -USR1 PID`: where every thread and every asyncio task of a process stands, on its standard error."""

import asyncio
import faulthandler
import signal
import sys


def show_on_signal(loop: asyncio.AbstractEventLoop) -> None:
    """The threads show even when the loop does not run; the tasks as soon as it does."""
    loop.add_signal_handler(signal.SIGUSR1, _show_tasks, loop)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)


def _show_tasks(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()
