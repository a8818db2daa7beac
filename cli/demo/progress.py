"""A demo while it goes on: what the view shows beside the run's status, lines for a log, the worst lag so far."""

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from cli.demo.machine import Machine
from cli.facts import Fact

logger = logging.getLogger("penstock.demo")

LINE_EVERY_S = 2.0


class Progress:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._said_at = time.monotonic()
        self._facts: list[Fact] = [Fact("starting", "redis")]
        self.status: dict[str, Any] = {}
        self.trainer = ""
        """what it said last"""
        self.worst: dict[str, dict[str, float]] = {}
        """event loop -> p99 and max, each of its worst ten seconds"""

    def beside(self) -> list[Fact]:
        """For the thread that draws."""
        return self._facts

    def look(self) -> None:
        self.status = self._machine.status() or self.status
        self.trainer = self._machine.trainer_says() or self.trainer
        if self.status:
            self._note_lag("orchestrator", self.status["event_loop_lag"])
        for lag in self._machine.lags():
            self._note_lag("orchestrator" if lag.process == "orchestrator" else "rollout worker", lag.as_dict())
        self._facts = list(self._look_beside())
        if time.monotonic() - self._said_at > LINE_EVERY_S:
            self._said_at = time.monotonic()
            self._say()

    def _note_lag(self, process: str, lag: Mapping[str, Any]) -> None:
        worst = self.worst.setdefault(process, {"p99_s": 0.0, "max_s": 0.0})
        worst.update({key: max(value, lag[key]) for key, value in worst.items()})

    def _look_beside(self) -> Iterator[Fact]:
        if self.trainer:
            yield Fact("trainer", self.trainer)
        starting = [name for name, part in self._machine.parts.items() if not part.ready]
        if starting:
            ready = [name for name, part in self._machine.parts.items() if part.ready]
            yield Fact("starting", f"{', '.join(starting)} (ready: {', '.join(['redis', *ready])})")

    def _say(self) -> None:
        """In a log: what the view shows. A person on a terminal sees the view instead."""
        if not (status := self.status):
            return
        filtered = ",".join(f"{reason}:{count}" for reason, count in status["rollouts"]["filtered"].items())
        queued = ",".join(f"{queue}:{depth}" for queue, depth in status["queued"].items())
        logger.info(
            "action=progress step=%d/%d rollouts_per_s=%.1f tokens_per_s=%.0f lag_p99_ms=%.1f queued=%s filtered=%s "
            "trainer=%r",
            status["step"], status["steps"], status["rollouts_per_s"], status.get("tokens_per_s") or 0.0,
            1000 * status["event_loop_lag"]["p99_s"], queued, filtered or "none", self.trainer,
        )  # fmt: skip
