"""A clock that moves only by `advance`."""

import time


class Clock:
    def __init__(self) -> None:
        self.now = float(int(time.monotonic()))  # whole seconds add up without rounding

    def advance(self, seconds: float) -> None:
        self.now += seconds
