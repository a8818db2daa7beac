"""What the trainer says, and how far ahead of it the run may be. Only files under `trainer/` are read."""

import logging
import math
import time
from dataclasses import replace

from orchestrator.ledger.ledger import Ledger
from penstock.batches import RunStatus, TrainerState, read_trainer, write_status
from penstock.config import RunConfig
from penstock.errors import BatchError, BlobUnwritten
from penstock.runtime.offload import in_io_thread

logger = logging.getLogger("penstock.trainer")

AWAITED_S = 5.0  # shorter than this a run waits for its trainer at every step
HORIZON_STEPS = 64  # without a trainer to wait for: far enough to fill any limit on rollouts in flight


class Trainer:
    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._run_dir = config.run_dir
        self._ahead = math.inf if config.trainer.max_steps_ahead == "unlimited" else config.trainer.max_steps_ahead
        self._ledger = ledger
        self.state = TrainerState()
        self._told: RunStatus | None = None
        self._awaited_since: float | None = None
        """since when nothing may be sealed before the trainer has gone on"""
        self.unreadable: str | None = None
        self.trouble: str | None = None
        """why a waiting trainer is not told what the run is doing"""

    async def look(self) -> None:
        """Take in acknowledgements and a new policy version."""
        try:
            state = await in_io_thread(read_trainer, self._run_dir)
        except BatchError as error:
            if self.unreadable is None:
                logger.error("action=trainer_unreadable %s", error)
            self.unreadable = f"what the trainer says cannot be read: {error}"
            return
        self.unreadable = None
        if state.policy and state.policy.version > self._ledger.number("policy_version"):
            self._ledger.set("policy_version", state.policy.version)
        if state.acked > self.state.acked:
            self._ledger.train(state.acked)
        self.state = state
        if self.may_seal(self._ledger.number("steps_delivered")):
            self._awaited_since = None
        else:
            self._awaited_since = self._awaited_since or time.monotonic()

    @property
    def troubles(self) -> list[str]:
        return [cause for cause in (self.trouble, self.unreadable, self.awaited) if cause]

    @property
    def awaited(self) -> str | None:
        """That the run waits for the trainer, once it has for a while: it is slow, or nobody started it."""
        if self._awaited_since is None or time.monotonic() - self._awaited_since < AWAITED_S:
            return None
        step = self._ledger.number("steps_delivered") - 1
        return (
            f"step {step} is sealed, and the trainer has not acknowledged step {self.state.acked + 1}: start one that "
            f"reads {self._run_dir} (examples/toy_trainer.py), or raise trainer.max_steps_ahead "
            '("unlimited" where nobody acknowledges)'
        )

    def may_seal(self, step: int) -> bool:
        """At most `max_steps_ahead` sealed steps wait behind the one that is being trained on."""
        return step <= self.state.acked + 1 + self._ahead

    def plannable_steps(self, first: int) -> int:
        """Rollouts may be begun for steps before this one: one beyond what may be sealed, so that nothing idles."""
        return int(min(first + HORIZON_STEPS, max(first, self.state.acked + 1 + self._ahead + 2)))

    async def tell(self, why: str, *, ended: bool = False) -> None:
        """What a waiting trainer is told when its patience ends."""
        status = RunStatus(why=why, ended=ended, last_step=self._ledger.number("steps_delivered") - 1)
        if status == self._told:
            return
        try:
            await in_io_thread(write_status, self._run_dir, status)
        except BlobUnwritten as error:
            if self.trouble is None:
                logger.error("action=trainer_not_told error=%s", error)
            self.trouble = f"a waiting trainer cannot be told so: {error}"
            return
        self._told, self.trouble = replace(status), None
