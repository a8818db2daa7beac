"""Live view of a run on a terminal: log lines, and below them the run's state, redrawn twice a second.

The event loop only hands over statuses and log records. Separate threads draw and write to the terminal, which may be
slow or stopped (Ctrl-S).
"""

import logging
import queue
import sys
from collections.abc import Callable, Iterable, Iterator
from logging.handlers import QueueHandler, QueueListener
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.text import Text

from headpond.commands import facts
from headpond.commands.facts import Fact, printable
from headpond.commands.output import LOG_FORMAT, table
from headpond.records.status import Status

REFRESH_PER_S = 2
MAX_RECORDS = 1_000  # queued while the terminal is stopped; later records are dropped
# Log lines that repeat the view. They are hidden unless they are warnings.
IN_VIEW = ("action=progress", "action=loop_lag")


class LiveView:
    """`with LiveView() as view: run(on_status=view.update)`"""

    def __init__(self, console: Console | None = None, *, more_facts: Callable[[], Iterable[Fact]] = tuple) -> None:
        """`more_facts` are shown below the status, and before the first; called by the thread that draws."""
        self._more_facts = more_facts
        self._console = console or Console(highlight=False)
        self._status: Status | None = None
        self._live = Live(
            get_renderable=self.draw, console=self._console, refresh_per_second=REFRESH_PER_S, transient=True
        )
        records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._queue_handler = BoundedQueueHandler(records)
        self._printer = QueueListener(records, self._log_handler())

    def update(self, status: Status) -> None:
        self._status = status

    def __enter__(self) -> Self:
        logging.basicConfig(level=logging.INFO, handlers=[self._queue_handler], format="%(message)s")
        self._printer.start()
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        logging.getLogger().removeHandler(self._queue_handler)
        self._printer.stop()
        self._live.stop()

    def _log_handler(self) -> logging.Handler:
        if sys.stderr.isatty():
            return ConsoleHandler(self._console)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        return handler

    def draw(self) -> RenderableType:
        more_facts = list(self._more_facts())
        if self._status:
            return view(self._status, more_facts)
        return table(more_facts) if more_facts else Text("starting ...", style="dim")


class BoundedQueueHandler(QueueHandler):
    """Drops records while the queue is full."""

    def __init__(self, records: "queue.SimpleQueue[logging.LogRecord]") -> None:
        super().__init__(records)
        self._records = records

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._records.qsize() < MAX_RECORDS:
            self._records.put(record)


class ConsoleHandler(logging.Handler):
    """Prints log lines above the view."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno <= logging.INFO and record.getMessage().startswith(IN_VIEW):
            return
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else "dim"
        self._console.print(Text(printable(self.format(record)), style=style))


def view(status: Status, more_facts: Iterable[Fact] = ()) -> RenderableType:
    grid = table([*_facts(status), *more_facts])
    grid.add_row("", ProgressBar(total=status.steps, completed=status.step, width=40))
    parts: list[RenderableType] = [grid]
    if status.waiting_for:
        causes = Text("\n").join(Text(printable(cause)) for cause in status.waiting_for)
        parts.append(Panel(causes, title="waiting for", title_align="left", border_style="bold yellow"))
    return Padding(Group(*parts), (1, 0, 0, 0))


def _facts(status: Status) -> Iterator[Fact]:
    phase = "" if status.phase == "running" else f", {status.phase}"
    yield Fact("run", f"{status.run}, {facts.duration(status.running_s)}{phase}", alarm=bool(phase))
    yield from facts.progress(status)
    yield Fact("queues", facts.listed(status.queued))
    yield facts.workers(status.running_by_worker)
    yield Fact("loop lag", f"{facts.loop_lag(status.event_loop_lag)} (orchestrator)")
    if others := status.other_loops:
        yield Fact("", facts.largest_lag(others))
