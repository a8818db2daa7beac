"""A clock that stands still until it is told."""

import time


class Clock:
    def __init__(self) -> None:
        self.now = time.monotonic()

    def advance(self, seconds: float) -> None:
        self.now += seconds
