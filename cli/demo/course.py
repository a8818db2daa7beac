"""The course of a demo, from its first process to its last, whoever stops it on the way."""

import shutil
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from cli.demo.machine import Machine
from cli.demo.options import Options
from cli.demo.progress import Progress

TICK_S = 0.2
CATCH_UP_S = 3.0  # for the trainer to read the last step of a run that was stopped
DONE = "done"
STOPPED = {signal.SIGINT: "stopped by Ctrl-C", signal.SIGTERM: "stopped by SIGTERM"}


class Interrupts:
    """Ctrl-C and SIGTERM, counted: nothing is done inside a handler."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        for signum in STOPPED:
            signal.signal(signum, self._note)

    @property
    def twice(self) -> bool:
        return len(self.signals) > 1

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signals.append(signum)


class Course:
    def __init__(self, options: Options, interrupts: Interrupts) -> None:
        self._options = options
        self._interrupts = interrupts
        self._machine = Machine(options)
        self.progress = Progress(self._machine)
        self.stopped = ""
        """why it ended before the last step"""
        self.seconds = 0.0

    def run(self, watch: Callable[[dict[str, Any]], None]) -> None:
        """No process is left, however this ends."""
        began = time.monotonic()
        try:
            self._machine.start()
            self._drive(watch)
            self._machine.stop(at_once=lambda: self._interrupts.twice)
        finally:
            self._machine.kill()
        self.progress.look()
        if not self._options.keep:
            shutil.rmtree(self._options.run_dir / "redis")
        self.seconds = time.monotonic() - began

    def _drive(self, watch: Callable[[dict[str, Any]], None]) -> None:
        machine, began = self._machine, time.monotonic()
        while not (machine.ended("orchestrator") and machine.ended("trainer")):
            over = machine.ended("orchestrator")
            machine.look()
            self.progress.look()
            if self.progress.status:
                watch(self.progress.status)
            if not self.stopped and (stopped := self._why_stop(over, time.monotonic() - began)):
                self.stopped = stopped
                machine.drain()
            if self._interrupts.twice or (over and self.stopped):
                self._let_trainer_catch_up()
                break
            time.sleep(TICK_S)

    def _why_stop(self, over: bool, seconds: float) -> str:
        if self._interrupts.signals:
            return STOPPED[signal.Signals(self._interrupts.signals[0])]
        if self.progress.status.get("phase") == DONE:
            return ""
        if over:
            return "the orchestrator was stopped"
        late = self._options.seconds is not None and seconds > self._options.seconds
        return "stopped by its time limit" if late else ""

    def _let_trainer_catch_up(self) -> None:
        deadline = time.monotonic() + CATCH_UP_S
        while self._machine.trainer_is_behind() and time.monotonic() < deadline and not self._interrupts.twice:
            time.sleep(TICK_S)
