"""How many rollouts may be in flight: `rollouts.max_in_flight`, lowered while the engine's own queue grows.

`LoadWatch` asks the replicas for their load, `InFlightLimit` decides.

Additive increase, multiplicative decrease. A request that waits in the engine's queue gains nothing and plays with
older weights than one that is submitted later; a preempted one is computed twice.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headpond.config import RunConfig
from headpond.engines.replicas.control import EngineControl, Load, Replica, polling
from headpond.orchestrator.ledger.ledger import Ledger

DECREASE = 0.8
INCREASE = 0.05  # of `most` per adjustment: from half to full in ten
ADJUST_S = 10.0  # between two adjustments: a lower limit shows in the queue only when running rollouts have ended
QUEUED_SHARE = 0.25  # of the running requests: with less in its queue, an engine is busy and not behind
QUEUED_FEW = 8
LOOK_S = 0.5  # at the loads that the poller has read


class InFlightLimit:
    @classmethod
    def of(cls, config: RunConfig) -> "InFlightLimit":
        least = config.rollouts.group_size * len(config.engine.urls)
        return cls(most=config.rollouts.max_in_flight, least=least)

    def __init__(self, *, most: int, least: int) -> None:
        self.most = most
        self.least = min(least, most)
        self.value = most
        self.why: str | None = None  # why it is below `most`
        self._preemptions: dict[str, int] = {}
        self._adjusted_at = 0.0

    def observe(self, loads: Mapping[str, Load], *, in_flight: int, now: float | None = None) -> None:
        """`loads` by replica; without any the limit stays as it is."""
        now = time.monotonic() if now is None else now
        preempted = self._preempted(loads)
        if not loads or now - self._adjusted_at < ADJUST_S:
            return
        if cause := preempted or _behind(list(loads.values())):
            self._adjusted_at = now
            self.value = max(self.least, int(min(self.value, in_flight) * DECREASE))
            self.why = cause
        elif self.value < self.most and in_flight >= self.value * (1 - INCREASE):
            self._adjusted_at = now
            self.value = min(self.most, self.value + max(1, int(self.most * INCREASE)))
            if self.value == self.most:
                self.why = None

    def notes(self) -> list[str]:
        most = f"at most {self.value:,} of {self.most:,} rollouts (rollouts.max_in_flight) are in flight"
        return [f"{most}: {self.why}"] if self.why else []

    def _preempted(self, loads: Mapping[str, Load]) -> str | None:
        """A counter that has fallen is of a server that restarted."""
        before, self._preemptions = self._preemptions, {url: load.preemptions for url, load in loads.items()}
        rose = sum(max(0, number - before.get(url, number)) for url, number in self._preemptions.items())
        return f"the engine has preempted {rose} requests since the last look" if rose else None


class LoadWatch:
    """Follows the load of the replicas that say it. One that cannot be reached, or says nothing, has no say."""

    def __init__(self, config: RunConfig, ledger: Ledger, replicas: Sequence[Replica]) -> None:
        self._settings = config.engine
        self._replicas = replicas
        self._adapts = config.rollouts.adapt_in_flight
        self._ledger = ledger
        self.limit = InFlightLimit.of(config)

    async def run(self) -> None:
        if not self._adapts:
            return
        async with EngineControl.open(self._settings) as control, polling(control.poll_load, self._replicas):
            while True:
                self.limit.observe(self.loads, in_flight=self._ledger.ungenerated)
                await asyncio.sleep(LOOK_S)

    @property
    def loads(self) -> dict[str, Load]:
        """Replica -> its load at the last look."""
        return {replica.url: replica.load for replica in self._replicas if replica.load}

    def status(self) -> dict[str, dict[str, Any]]:
        """By replica that says it."""
        return {
            url: {"running": load.running, "waiting": load.waiting, "cache_use": round(load.cache_use, 3)}
            for url, load in self.loads.items()
        }


def _behind(loads: Sequence[Load]) -> str | None:
    waiting, running = sum(load.waiting for load in loads), sum(load.running for load in loads)
    if waiting > max(QUEUED_FEW, QUEUED_SHARE * running):
        return f"{waiting} requests waited in the engine's queue beside {running} running ones"
    if waiting and any(load.cache_is_full for load in loads):
        return f"the engine's KV cache was full, and {waiting} requests waited"
    return None
