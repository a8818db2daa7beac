"""The replicas of a server: requests in flight, version of the weights, and when each was last unreachable."""

import contextlib
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

# How long an unreachable replica is the last choice. A restart takes longer; after this, one request at a time finds
# out whether the replica is back.
AVOIDED_S = 5.0


@dataclass(kw_only=True, eq=False)
class Replica:
    url: str
    version: int = 0
    """Of its weights, as last announced."""
    in_flight: int = 0
    unreachable_at: float = -math.inf
    """When a connection last failed, by the monotonic clock."""

    @property
    def avoided(self) -> bool:
        return time.monotonic() - self.unreachable_at < AVOIDED_S

    def mark_unreachable(self) -> None:
        self.unreachable_at = time.monotonic()

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        """Count one request in flight."""
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

    def choose(self, preferred: Replica | None = None, *, failed: Replica | None = None) -> Replica:
        """`preferred`, whose prefix cache has the conversation, unless it is avoided or just failed; otherwise the
        replica with the fewest requests in flight, round robin among equals."""
        if preferred and preferred is not failed and not preferred.avoided:
            return preferred
        chosen = min(self.all, key=lambda replica: (replica.avoided, replica is failed, replica.in_flight))
        self.all.remove(chosen)
        self.all.append(chosen)
        return chosen

    def announce(self, version: int, *, url: str | None = None) -> None:
        """Set the version of one replica's weights, or of all. After a resumption it may be an older one."""
        for replica in self.all:
            if url in (None, replica.url):
                replica.version = version
