"""The trainer's acknowledgements and policy versions, and how far the run may be ahead of it: files in `trainer/`."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from headpond.batches import RunStatus, TrainerState, read_trainer, write_status
from headpond.batches.prime_rl_directory import LAYOUTS, accept_broadcasts, read_broadcasts
from headpond.config import RunConfig
from headpond.config.run import Trainer as TrainerSettings
from headpond.engines.replicas.control import reload_advice
from headpond.errors import BatchError, RunError
from headpond.event_loop.offload import in_io_thread, to_its_end_in_io_thread
from headpond.orchestrator.duties.housekeeping import Reported, Troubles
from headpond.orchestrator.ledger.ledger import Ledger

AWAITED_S = 5.0  # a run waits less than this for its trainer at every step: not worth reporting
RANKS_NAMED = 8  # of a trainer, in a cause
HORIZON_STEPS = 64  # with max_steps_ahead = "unlimited": enough to fill any limit on rollouts in flight


def trainer_state(config: RunConfig, *, accept: bool = False) -> TrainerState:
    """By prime-rl's own broadcasts if the run writes its format and there are any, else by the trainer's signals.
    `accept`: the trainer may go on with the broadcast that it offers."""
    broadcasts = None
    if config.batch.format != "native":
        if accept:
            accept_broadcasts(config.prime_rl_dir)
        broadcasts = read_broadcasts(config.prime_rl_dir)
    return broadcasts or read_trainer(config.run_dir)


def last_released(settings: TrainerSettings, state: TrainerState) -> int:
    # A trainer that resumes reads every step again that it has not acknowledged, even if checkpointed.
    return min(state.checkpointed, state.acked) if settings.release_on == "checkpointed" else state.acked


class Trainer:
    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        *,
        accept: bool = True,
        holds_update: Callable[[], bool] | None = None,
        troubles: Troubles | None = None,
    ) -> None:
        """`holds_update`: whether weights that the run loads must wait for evaluations of the present version."""
        troubles = troubles or Troubles()
        self._run_dir = config.run_dir
        self._read = partial(trainer_state, config, accept=accept)
        self._settings = config.trainer
        self._engine = config.engine
        layout = LAYOUTS.get(config.batch.format)
        self._handshake = layout is not None and layout.handshake
        # when the trainer was last seen to acknowledge a step, by the monotonic clock
        self._progress_s: float | None = None
        self._ahead = math.inf if config.trainer.max_steps_ahead == "unlimited" else config.trainer.max_steps_ahead
        self._ledger = ledger
        self.state = self._unread = TrainerState()
        self._holds_update = holds_update if config.engine.weight_update == "headpond" else None
        self._written: RunStatus | None = None
        self._awaited_since: float | None = None  # since when sealing waits for an acknowledgement
        self._writing = Reported("write the status that a waiting trainer reads", troubles=troubles)
        self._reading = Reported("read the trainer's progress", errors=(OSError, BatchError), troubles=troubles)
        troubles.add(lambda: [self._awaited])
        # why a run that is done, complete or out of data, has not ended
        self._last_broadcast = troubles.entry()

    async def read(self) -> None:
        """Apply new acknowledgements and a new policy version, which is lower when a trainer resumes from an older
        checkpoint. RunError if the first one is below the run's start version."""
        with self._reading:
            state = await in_io_thread(self._read)
            new = state.policy and state.policy.version != self._ledger.state.policy_version
            # A newer version is taken when nothing needs the present weights any more.
            self._apply(
                replace(state, policy=self.state.policy)
                if new and self._holds_update and self._holds_update()
                else state
            )

    def _apply(self, state: TrainerState) -> None:
        if state.policy and not self._ledger.state.policy_published:
            self._check_first(state.policy.version)
            self._ledger.state.policy_published = True
        if state.policy and state.policy.version != self._ledger.state.policy_version:
            self._ledger.state.policy_version = state.policy.version
        if state.acked > self.state.acked:
            self._ledger.train(state.acked)
            if self.state.epoch or self.state.policy:  # seen before: a complete run that is started again does not wait
                self._progress_s = time.monotonic()
        self.state = state
        awaited = not self.may_seal(self._ledger.state.steps_delivered)
        self._awaited_since = (self._awaited_since or time.monotonic()) if awaited else None

    def _check_first(self, version: int) -> None:
        """A trainer may publish the weights that it begins with, under a lower number, before a step is composed. Later
        it has trained on what other weights sampled, and counts otherwise than the engine."""
        start = self._ledger.state.start_version
        if version >= start or not (self._ledger.state.steps_delivered or self._ledger.batches):
            return
        raise RunError(
            f"the trainer's first publication is version {version}, and the run started with version {start}, which "
            "the engine reported: its first step was sampled by those weights. If the trainer continues from them, let "
            f"it count on from {start}: publish_policy(reader.start_version + batch.step + 1), and start it before the "
            f"run. If it begins with other weights, {reload_advice(self._engine)}; then start a new run with another "
            "run_dir"
        )

    @property
    def published(self) -> bool:
        """Whether a trainer has published a version in this run."""
        return self._ledger.state.policy_published or self.state.policy is not None

    @property
    def _awaited(self) -> str | None:
        """Reported after AWAITED_S: the trainer is slow, or was not started."""
        if self._awaited_since is None or time.monotonic() - self._awaited_since < AWAITED_S:
            return None
        step = self._ledger.state.steps_delivered - 1
        behind = ", ".join(map(str, self.state.behind[:RANKS_NAMED]))
        who = f"{f'rank {behind} of ' if behind else ''}the trainer has not"
        then = "it is slow, paused or not running: look at its log"
        if not self.state.data_ranks:
            who, then = "no trainer has", f"start one that reads {self._run_dir} (examples/toy_trainer.py)"
        return (
            f"step {step} is sealed, and {who} acknowledged step {self.state.acked + 1}: {then}, or raise "
            'trainer.max_steps_ahead ("unlimited" if the trainer does not acknowledge)'
        )

    def last_broadcast_awaited(self) -> bool:
        """Whether a run that is done stays for its trainer, which waits until each of its broadcasts is accepted."""
        progress_s = self._progress_s if self._handshake and self._untrained_steps else None
        self._last_broadcast.text = None
        if progress_s is None or time.monotonic() - progress_s >= self._settings.last_broadcast_s:
            return False
        self._last_broadcast.text = (
            f"every step is delivered, and prime-rl's trainer has {self._untrained_steps} to train: the run accepts "
            f"its broadcasts until the last one, at most {self._settings.last_broadcast_s:g} s after the one before "
            "(trainer.last_broadcast_s); Ctrl-C ends the run now"
        )
        return True

    @property
    def _untrained_steps(self) -> int:
        return self._ledger.state.steps_delivered - 1 - self.state.acked

    @property
    def last_released(self) -> int:
        """Blobs of steps up to this one may be deleted, as far as the trainer is concerned."""
        return last_released(self._settings, self.state)

    @property
    def holds_because(self) -> str | None:
        """Why the trainer still holds the blobs of the first step that is not released, and what to change. None before
        its files were read for the first time."""
        state, step = self.state, self.last_released + 1
        if state is self._unread:
            return None
        if state.acked < step:
            return f"the trainer has not acknowledged step {step}: call reader.ack(step) after each step"
        return (
            f"the trainer has acknowledged step {state.acked} and has not checkpointed step {step}: call "
            'reader.checkpointed(step) after each checkpoint, or set trainer.release_on = "acked"'
        )

    def may_seal(self, step: int) -> bool:
        """At most `max_steps_ahead` sealed steps wait behind the one in training."""
        return step <= self.state.acked + 1 + self._ahead

    def plannable_steps(self, first: int) -> int:
        """Rollouts may begin for steps before this one: one beyond the sealable ones, so that the engine is busy."""
        return int(min(first + HORIZON_STEPS, max(first, self.state.acked + 1 + self._ahead + 2)))

    async def write_status(self, why: str, *, ended: bool = False) -> None:
        """`why` is what a waiting trainer raises when its time-out ends."""
        status = RunStatus(why=why, ended=ended, last_step=self._ledger.state.steps_delivered - 1)
        if status == self._written:
            return
        with self._writing:
            await to_its_end_in_io_thread(write_status, self._run_dir, status)
            self._written = status
