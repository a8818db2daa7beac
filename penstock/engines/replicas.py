"""The replicas of the engine: how busy each is, which weights it has, whether it could be connected to."""

import contextlib
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

# A replica that could not be connected to is the last choice for this long: a restart takes longer, and one request
# in between finds out early enough that it is back.
AVOIDED_S = 5.0


@dataclass(kw_only=True, eq=False)
class Replica:
    url: str
    version: int = 0
    """of its weights, as last announced"""
    in_flight: int = 0
    away_at: float = -math.inf
    """when it last could not be connected to, by the monotonic clock"""

    @property
    def avoided(self) -> bool:
        return time.monotonic() - self.away_at < AVOIDED_S

    def mark_away(self) -> None:
        self.away_at = time.monotonic()

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Replicas:
    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Replica(url=url) for url in urls]

    @property
    def all_avoided(self) -> bool:
        return all(replica.avoided for replica in self.all)

    def choose(self, home: Replica | None = None, *, failed: Replica | None = None) -> Replica:
        """`home`, whose cache knows the conversation, unless it is away or just failed; else the least busy, in turn
        where equal."""
        if home and home is not failed and not home.avoided:
            return home
        chosen = min(self.all, key=lambda replica: (replica.avoided, replica is failed, replica.in_flight))
        self.all.remove(chosen)
        self.all.append(chosen)
        return chosen

    def announce(self, version: int, *, url: str | None = None) -> None:
        """The weights of one replica, or of all, are of this version now; after a resumption it may be an older one."""
        for replica in self.all:
            if url in (None, replica.url):
                replica.version = version
