"""Start and duration of a rollout's parts, to draw its timeline.

The process that records turns times them, in the table of turns. Tools, judges and programs add
their spans here, to the rollout whose task calls them.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

SPANS_MOST = 500  # Most spans of one rollout: 30 kB in its columns. Later ones are dropped.
NAME_CHARACTERS = 40

# `rollout` is the environment's call as a whole.
Kind = Literal["rollout", "tool", "grading", "program"]


class TimedSpan(NamedTuple):
    kind: str
    name: str
    begun_at: float  # Start by this host's clock.
    seconds: float


class Stopwatch:
    def __init__(self) -> None:
        self.begun_at = time.time()
        self._started = time.monotonic()
        self.seconds = 0.0

    def stop(self) -> "Stopwatch":
        self.seconds = time.monotonic() - self._started
        return self


_spans: ContextVar[list[TimedSpan] | None] = ContextVar("spans", default=None)


@contextmanager
def collected() -> Generator[list[TimedSpan]]:
    """Collect the spans of this task and its children. Each span is added when it ends."""
    spans: list[TimedSpan] = []
    token = _spans.set(spans)
    try:
        yield spans
    finally:
        _spans.reset(token)


@contextmanager
def timed(kind: Kind, name: str = "") -> Generator[None]:
    watch, spans = Stopwatch(), _spans.get()
    try:
        yield
    finally:
        if spans is not None and len(spans) < SPANS_MOST:
            seconds = round(watch.stop().seconds, 4)
            spans.append(TimedSpan(kind, name[:NAME_CHARACTERS], round(watch.begun_at, 4), seconds))
