"""Decides which workers take no jobs: those whose jobs fail while the jobs of another worker do not.

Pure: it is told outcomes and who is there, with the time. A worker in quarantine gets a trial of one job after a pause
that doubles; the last worker of a kind is never in quarantine.
"""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

WINDOW = 16  # outcomes of a worker that are compared
LEAST_FAILURES = 3
FAILING = 0.5  # share of failures from which a worker may be quarantined
BETTER = 4  # another worker fails this many times less often
PAUSE_FIRST_S, PAUSE_MOST_S = 5.0, 300.0


class Standing(StrEnum):
    ADMITTED = "admitted"
    QUARANTINED = "quarantined"
    TRIAL = "trial"  # one job at a time, until one succeeds or fails


@dataclass(kw_only=True)
class Health:
    """Of one worker."""

    standing: Standing = Standing.ADMITTED
    # the last ones, True is a success
    outcomes: deque[bool] = field(default_factory=lambda: deque[bool](maxlen=WINDOW))
    error: str = ""  # of the last failure
    failures: int = 0  # since it was admitted
    pause_s: float = 0.0
    until: float = 0.0  # of the quarantine

    @property
    def failed(self) -> int:
        return self.outcomes.count(False)

    @property
    def failing(self) -> float:
        return self.failed / len(self.outcomes) if self.outcomes else 0.0


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A worker that is there and has the run's settings."""

    node: str
    kind: str
    running: int


class Quarantine:
    def __init__(self) -> None:
        self._health: dict[str, Health] = {}

    def succeeded(self, node: str) -> None:
        health = self._of(node)
        if health.standing is Standing.TRIAL:
            self._admit(health)
        elif health.standing is Standing.ADMITTED:
            health.outcomes.append(True)
            if health.pause_s and len(health.outcomes) == WINDOW and not health.failed:
                health.pause_s = 0.0

    def failed(self, node: str, error: str, now: float) -> None:
        health = self._of(node)
        health.error = error
        health.failures += 1
        if health.standing is Standing.TRIAL:
            self._exclude(health, now)
        elif health.standing is Standing.ADMITTED:
            health.outcomes.append(False)

    def standing(self, node: str) -> Standing:
        health = self._health.get(node)
        return health.standing if health else Standing.ADMITTED

    def review(self, peers: Collection[Peer], now: float) -> list[str]:
        """Decide anew, knowing every worker that is there. Returns those that were quarantined just now."""
        there = {peer.node for peer in peers}
        self._health = {node: health for node, health in self._health.items() if node in there}
        for health in self._health.values():
            if health.standing is Standing.QUARANTINED and now >= health.until:
                health.standing = Standing.TRIAL
        excluded = [peer.node for peer in peers if self._is_worse(peer, peers)]
        for node in excluded:
            self._exclude(self._of(node), now)
        for kind in {peer.kind for peer in peers}:
            self._keep_the_last([peer.node for peer in peers if peer.kind == kind])
        return [node for node in excluded if self.standing(node) is Standing.QUARANTINED]

    def excluded(self) -> Iterator[tuple[str, Health]]:
        """Workers in quarantine or on trial."""
        return ((node, health) for node, health in self._health.items() if health.standing is not Standing.ADMITTED)

    def _is_worse(self, peer: Peer, peers: Collection[Peer]) -> bool:
        health = self._of(peer.node)
        if health.standing is not Standing.ADMITTED or health.failed < LEAST_FAILURES or health.failing < FAILING:
            return False
        others = ((other, self._of(other.node)) for other in peers if other.kind == peer.kind and other != peer)
        return any(
            other_health.standing is Standing.ADMITTED
            and other_health.failing * BETTER <= health.failing
            and (any(other_health.outcomes) or other.running)
            for other, other_health in others
        )

    def _keep_the_last(self, nodes: list[str]) -> None:
        healths = [self._of(node) for node in nodes]
        if not any(health.standing is Standing.ADMITTED for health in healths):
            for health in healths:
                self._admit(health)

    def _of(self, node: str) -> Health:
        health = self._health.get(node)
        if health is None:
            health = self._health[node] = Health()
        return health

    @staticmethod
    def _exclude(health: Health, now: float) -> None:
        health.pause_s = min(2 * health.pause_s, PAUSE_MOST_S) if health.pause_s else PAUSE_FIRST_S
        health.standing, health.until = Standing.QUARANTINED, now + health.pause_s
        health.outcomes.clear()

    @staticmethod
    def _admit(health: Health) -> None:
        health.standing, health.failures = Standing.ADMITTED, 0
        health.outcomes.clear()
