"""How many bytes of bodies one process receives at once: over the limit, whoever wants more waits, in order of arrival.

A body whose length is known reserves it in one piece, so the limit holds exactly. One that grows chunk by chunk could
wait for others that wait for it; therefore the oldest of those that hold something always goes on, and only that one
can take the total over the limit.

What else bodies cost is left free, at most half of the limit: `copies` of the largest, since a body is joined before it
is read; what each that waits has `buffered` already; and the share of their size that is `lost` between their pieces.
"""

import asyncio
import contextlib
from collections.abc import Generator


class Share:
    """What one body holds of a budget."""

    def __init__(self, budget: "ByteBudget") -> None:
        self._budget = budget
        self.held = 0

    async def reserve(self, size: int) -> None:
        """Wait until `size` more bytes may be received."""
        await self._budget.reserve(self, size)


class ByteBudget:
    def __init__(self, limit: int, *, copies: int = 0, buffered: int = 0, lost: float = 0.0) -> None:
        self.limit = limit
        self._copies = copies
        self._buffered = buffered
        self._lost = lost
        self._largest = 0
        self.used = self.most_used = 0
        self._holders: dict[Share, None] = {}  # oldest first
        self._waiting: dict[Share, tuple[int, asyncio.Future[None]]] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextlib.contextmanager
    def share(self) -> Generator[Share]:
        """Everything that was reserved is given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self._holders.pop(share, None)
            self.used -= share.held
            self._admit()

    async def reserve(self, share: Share, size: int) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._waiting[share] = (size, granted)
        self._admit()
        try:
            await granted
        finally:
            if self._waiting.pop(share, None):  # cancelled before its turn: the next one may fit
                self._admit()

    def _admit(self) -> None:
        while self._waiting:
            oldest = next(iter(self._holders), None)
            share = oldest if oldest in self._waiting else next(iter(self._waiting))
            size, granted = self._waiting[share]
            if share is not oldest and not self._fits(share, size):
                return
            del self._waiting[share]
            self.used += size
            self.most_used = max(self.most_used, self.used)
            share.held += size
            self._largest = max(self._largest, share.held)
            self._holders[share] = None
            if not granted.done():
                granted.set_result(None)

    def _fits(self, share: Share, size: int) -> bool:
        if not self.used:  # a body that leaves no room for its copies is received alone
            return size <= self.limit
        beside = self._copies * max(self._largest, share.held + size)
        beside += self._buffered * (len(self._waiting) - 1) + self._lost * (self.used + size)
        return self.used + size + min(beside, self.limit // 2) <= self.limit
