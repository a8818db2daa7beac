"""What a benchmark is doing, on stderr: a line that changes on a terminal, else a new line every few seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

PLAIN_EVERY_S = 5.0

Say = Callable[[str], None]


@contextmanager
def progress(bench: str) -> Iterator[Say]:
    """`with progress("control") as say: say("round 1 of 5")`"""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(bench) as status:
            yield lambda text: status.update(f"{bench}: {text}")
        return
    said_at = 0.0

    def say(text: str) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= PLAIN_EVERY_S:
            said_at = time.monotonic()
            console.print(f"{bench}: {text}", soft_wrap=True)

    yield say
