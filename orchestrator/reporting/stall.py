"""Ends a run that makes no progress for `recovery.stall_s`, with what it waits for."""

import time

from headpond.config import RunConfig
from headpond.errors import RunError
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.trainer import Trainer

LOOK_MOST_S = 2.0  # that one look counts for: more is a pause of this process


class StallWatch:
    def __init__(self, config: RunConfig, ledger: Ledger, trainer: Trainer, troubles: Troubles) -> None:
        self._stall_s = config.recovery.stall_s
        self._ledger = ledger
        self._trainer = trainer
        self._troubles = troubles
        self._before: tuple[int, ...] = ()
        self._looked_at = time.monotonic()
        # since the last progress, by this process's own looks: a pause of it does not
        # count
        self.idle_s = 0.0

    def look(self) -> None:
        """RunError after `stall_s` without progress."""
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, LOOK_MOST_S), now
        progress = self._progress()
        self.idle_s = self.idle_s + passed_s if progress == self._before else 0.0
        self._before = progress
        if self._stall_s and self.idle_s >= self._stall_s:
            waits = "; ".join(self._troubles.texts()) or "rollouts are being generated, and none has ended"
            raise RunError(
                f"stopped after {self._stall_s:g} s without progress (recovery.stall_s): {waits}. Nothing is lost, and "
                "the same command resumes the run"
            )

    def _progress(self) -> tuple[int, ...]:
        state = self._ledger.state
        evaluated = self._ledger.evaluation_rollouts.total()  # with the planned ones: each of them is played once
        return state.groups_admitted, state.steps_delivered, self._trainer.state.acked, evaluated
