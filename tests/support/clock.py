"""A clock that moves only by `advance`."""

import time


class Clock:
    def __init__(self) -> None:
        self.now = time.monotonic()

    def advance(self, seconds: float) -> None:
        self.now += seconds
