"""Calls from the loop thread that run on the hub thread (Celery's main thread), in order, a group at a time.

Not `Hub.call_soon`: its callbacks run just before the hub polls, so that what they schedule in turn (acknowledgements,
events) waits for the next message, up to a second. What a reader of the hub schedules runs at once.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from kombu.asynchronous.hub import Hub

# A turn of the hub for each outcome cost a no-op task 6 to 20 % of its CPU.
GATHER_S = 0.01


class HubCalls:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._wake_due = False

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """On the loop thread."""
        self._calls.append((call, args))
        if not self._wake_due:
            self._wake_due = True
            self._loop.call_later(GATHER_S, self._wake)

    def register(self, hub: Hub) -> None:
        """On the hub thread, again after every reconnection: it resets the hub, which then forgets its readers."""
        hub.add_reader(self._woken, self._on_wake)

    def run(self) -> None:
        """On the hub thread. A call that raises leaves the later ones for the next time."""
        try:
            while self._calls:
                call, args = self._calls.popleft()
                call(*args)
        finally:
            if self._calls:
                self._wake()

    def _on_wake(self) -> None:
        self._woken.recv(1)
        # Before the calls are taken: a call posted from here on wakes again, one posted before is among them.
        self._wake_due = False
        self.run()

    def _wake(self) -> None:
        self._waker.send(b"\0")
