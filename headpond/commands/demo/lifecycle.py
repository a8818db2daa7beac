"""A demo from its first process to its last: start, progress, interrupts, stop. No process outlives it."""

import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any

from headpond.commands import curve
from headpond.commands.demo.options import Options
from headpond.commands.demo.processes import DemoProcesses
from headpond.commands.facts import Fact
from headpond.commands.interrupts import Interrupts
from headpond.commands.output import StatusCallback

logger = logging.getLogger("headpond.demo")

TICK_S = 0.2
CATCH_UP_S = 3.0  # for the trainer to read the last step of a run that was stopped
LOG_EVERY_S = 2.0
DONE = "done"


class Progress:
    """The latest status of a demo: facts for the live view, lines for the log, and the largest loop lags."""

    def __init__(self, processes: DemoProcesses) -> None:
        self._processes = processes
        self._logged_at = time.monotonic()
        self._facts: list[Fact] = [Fact("starting", "redis")]
        self.status: dict[str, Any] = {}
        self.trainer = ""
        """last line of the trainer's output"""
        self.rewards: list[float] = []
        """mean reward of each delivered step"""
        self.largest_lags: dict[str, dict[str, float]] = {}
        """event loop -> largest p99 and max over all windows of ten seconds"""

    def facts(self) -> list[Fact]:
        """Facts that the status lacks. Called by the thread that draws."""
        return self._facts

    def update(self) -> None:
        self.status = self._processes.status() or self.status
        self.trainer = self._processes.trainer_line() or self.trainer
        if self.status.get("step", 0) > len(self.rewards):
            self.rewards = self._processes.rewards()
        if self.status:
            self._add_lag("orchestrator", self.status["event_loop_lag"])
        for lag in self._processes.lags():
            self._add_lag("orchestrator" if lag.process == "orchestrator" else "rollout worker", lag.as_dict())
        self._facts = list(self._current_facts())
        if time.monotonic() - self._logged_at > LOG_EVERY_S:
            self._logged_at = time.monotonic()
            self._log()

    def _add_lag(self, process: str, lag: Mapping[str, Any]) -> None:
        largest = self.largest_lags.setdefault(process, {"p99_s": 0.0, "max_s": 0.0})
        largest.update({key: max(value, lag[key]) for key, value in largest.items()})

    def _current_facts(self) -> Iterator[Fact]:
        if self.trainer:
            yield Fact("trainer", self.trainer)
        if self.rewards:
            yield Fact("reward", f"{self.rewards[-1]:.2f} in step {len(self.rewards) - 1}")
            for line in curve.drawn(self.rewards, self.status["steps"]):
                yield Fact("", line)
        starting = [name for name, part in self._processes.parts.items() if not part.ready]
        if starting:
            ready = [name for name, part in self._processes.parts.items() if part.ready]
            yield Fact("starting", f"{', '.join(starting)} (ready: {', '.join(['redis', *ready])})")

    def _log(self) -> None:
        """The content of the live view as a log line; the view itself does not show this line."""
        if not (status := self.status):
            return
        filtered = ",".join(f"{reason}:{count}" for reason, count in status["rollouts"]["filtered"].items())
        queued = ",".join(f"{queue}:{depth}" for queue, depth in status["queued"].items())
        logger.info(
            "action=progress step=%d/%d rollouts_per_s=%.1f tokens_per_s=%.0f lag_p99_ms=%.1f queued=%s filtered=%s "
            "reward=%.2f trainer=%r",
            status["step"], status["steps"], status["rollouts_per_s"], status.get("tokens_per_s") or 0.0,
            1000 * status["event_loop_lag"]["p99_s"], queued, filtered or "none",
            self.rewards[-1] if self.rewards else 0.0, self.trainer,
        )  # fmt: skip


class Demo:
    def __init__(self, options: Options, interrupts: Interrupts) -> None:
        self._options = options
        self._interrupts = interrupts
        self._processes = DemoProcesses(options)
        self.progress = Progress(self._processes)
        self.stopped = ""
        """why it ended before the last step"""
        self.seconds = 0.0

    def run(self, on_status: StatusCallback) -> None:
        """Run until the last step, an interrupt or the time limit. Every process has ended on return."""
        started = time.monotonic()
        try:
            self._processes.start()
            self._drive(on_status)
            self._processes.stop(at_once=lambda: self._interrupts.twice)
        finally:
            self._processes.kill()
        self.progress.update()
        if not self._options.keep:
            shutil.rmtree(self._options.run_dir / "redis")
        self.seconds = time.monotonic() - started

    def _drive(self, on_status: StatusCallback) -> None:
        processes, started = self._processes, time.monotonic()
        while not (processes.ended("orchestrator") and processes.ended("trainer")):
            over = processes.ended("orchestrator")
            processes.check()
            self.progress.update()
            if self.progress.status:
                on_status(self.progress.status)
            if not self.stopped and (stopped := self._reason_to_stop(over, time.monotonic() - started)):
                self.stopped = stopped
                processes.drain()
            if self._interrupts.twice or (over and self.stopped):
                self._let_trainer_catch_up()
                break
            time.sleep(TICK_S)

    def _reason_to_stop(self, over: bool, seconds: float) -> str:
        if self._interrupts.signals:
            return self._interrupts.why
        if self.progress.status.get("phase") == DONE:
            return ""
        if over:
            return "the orchestrator was stopped"
        late = self._options.seconds is not None and seconds > self._options.seconds
        return "stopped by its time limit" if late else ""

    def _let_trainer_catch_up(self) -> None:
        deadline = time.monotonic() + CATCH_UP_S
        while self._processes.trainer_is_behind() and time.monotonic() < deadline and not self._interrupts.twice:
            time.sleep(TICK_S)
