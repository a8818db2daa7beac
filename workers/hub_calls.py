"""Calls posted by the loop thread that run on the hub thread (Celery's main thread), in order and in batches.

`Hub.call_soon` is not used: its callbacks run just before the hub polls, so calls that they schedule (acknowledgements,
events) wait for the next message, up to a second. Calls that a reader of the hub schedules run at once.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from kombu.asynchronous.hub import Hub

# Seconds between two batches: one iteration of the hub per outcome cost a no-op task 6 to 20 % of its CPU.
BATCH_S = 0.01


class HubCalls:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._wake_due = False

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Called on the loop thread."""
        self._calls.append((call, args))
        if not self._wake_due:
            self._wake_due = True
            self._loop.call_later(BATCH_S, self._wake)

    def register(self, hub: Hub) -> None:
        """Called on the hub thread, at start and after every reconnection, which removes the hub's readers."""
        hub.add_reader(self._woken, self._on_wake)

    def run(self) -> None:
        """Called on the hub thread. After a call that raises, the remaining ones run in the next batch."""
        try:
            while self._calls:
                call, args = self._calls.popleft()
                call(*args)
        finally:
            if self._calls:
                self._wake()

    def _on_wake(self) -> None:
        self._woken.recv(1)
        # Cleared before the calls are taken: a call posted later wakes the hub again, an earlier one is among them.
        self._wake_due = False
        self.run()

    def _wake(self) -> None:
        self._waker.send(b"\0")
