"""`kill -USR1 PID` prints the stacks of all threads and asyncio tasks of the orchestrator to its standard error."""

import asyncio
import faulthandler
import signal
import sys


def show_on_signal(loop: asyncio.AbstractEventLoop) -> None:
    """Thread stacks are printed even if the loop is blocked; task stacks when it runs again."""
    loop.add_signal_handler(signal.SIGUSR1, _show_tasks, loop)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)


def _show_tasks(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()
