"""Calls from other threads that run on the hub thread (Celery's main thread), in order, with few wake-ups.

Not `Hub.call_soon`: its callbacks run just before the hub polls, so that what they schedule in turn (acknowledgements,
events) waits for the next message, up to a second. What a reader of the hub schedules runs at once.
"""

import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from kombu.asynchronous.hub import Hub


class HubCalls:
    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._wake_sent = False

    def register(self, hub: Hub) -> None:
        """Again after every reconnection: it resets the hub, which then forgets its readers."""
        hub.add_reader(self._woken, self._on_wake)

    def post(self, call: Callable[..., None], *args: Any) -> None:
        self._calls.append((call, args))
        self._wake()

    def run(self) -> None:
        """On the hub thread. A call that raises leaves the later ones for the next time."""
        try:
            while self._calls:
                call, args = self._calls.popleft()
                call(*args)
        finally:
            if self._calls:
                self._wake()

    def _wake(self) -> None:
        if not self._wake_sent:
            self._wake_sent = True
            self._waker.send(b"\0")

    def _on_wake(self) -> None:
        self._woken.recv(1)
        # Before the calls are taken: a call posted from here on wakes again, one posted before is among them.
        self._wake_sent = False
        self.run()
