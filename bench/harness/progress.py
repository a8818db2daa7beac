"""Progress of a benchmark on stderr: one updated line on a terminal, otherwise a new line every few seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

PLAIN_EVERY_S = 5.0

Show = Callable[[str], None]


@contextmanager
def progress(bench: str) -> Iterator[Show]:
    """`with progress("control") as show: show("round 1 of 5")`"""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(bench) as status:
            yield lambda text: status.update(f"{bench}: {text}")
        return
    shown_at = 0.0

    def show(text: str) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= PLAIN_EVERY_S:
            shown_at = time.monotonic()
            console.print(f"{bench}: {text}", soft_wrap=True)

    yield show
