"""Starts the parts of a run, starts again what dies, with a growing pause, and stops all of them."""

import logging
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headpond.commands.up.parts import Part
from headpond.errors import RunError
from headpond.inspection.status import full_disk
from headpond.runtime.child_process import ChildProcess, Guard
from headpond.runtime.privacy import PREFIX

logger = logging.getLogger("headpond.up")

PAUSE_FIRST_S, PAUSE_MOST_S = 1.0, 30.0
STEADY_S = 60.0  # a process that has run for this long begins again with the first pause
STARTS_MOST = 5  # in a row without getting ready: it never will
LOG_BYTES = 16 << 20  # of one log; the one before it is kept as NAME.log.1
LOOK_AT_LOGS_S = 5.0
TAIL_LINES = 15
TICK_S = 0.05
TRACEBACK = "Traceback (most recent call last)"
ERROR = re.compile(r"(?:\[[^]]*\]:? *)?[\w.]*(?:Error|Exception)\b: *\S")
"""The line of a Python error with its text. torchrun writes its own report, without the reason, behind that."""


@dataclass(kw_only=True)
class Supervised:
    part: Part
    process: ChildProcess
    ready: bool = False
    over: bool = False
    """it has ended and is not started again"""
    started_at: float
    began_at: float
    """the same as a time of day, of which files tell"""
    restarts: int = 0
    unready_starts: int = 1
    """in a row"""
    restart_at: float | None = None
    pause_s: float = PAUSE_FIRST_S
    last_words: str = ""
    """how it ended the last time"""
    reason: str = ""
    """the line of its output that says why"""


class Supervisor:
    """Every call from the main thread: children end with the thread that starts them."""

    def __init__(self, logs: Path, environment: Mapping[str, str], cwd: Path) -> None:
        self._logs = logs
        self._environment = dict(environment)
        self._cwd = cwd
        self._guard = Guard()
        self._looked_at_logs = 0.0
        self.stopping = False
        """whether a process that ends stays ended"""
        self.parts: dict[str, Supervised] = {}

    def tell(self, **variables: str) -> None:
        """Add variables to the environment of the processes that start from now on."""
        self._environment |= variables

    def start(self, part: Part) -> None:
        logger.info("action=starting process=%s log=%s", part.name, self._logs / f"{part.name}.log")
        began_at, started_at = time.time(), time.monotonic()
        self.parts[part.name] = Supervised(
            part=part, process=self._spawn(part), began_at=began_at, started_at=started_at
        )

    def ready(self, name: str) -> bool:
        return name in self.parts and self.parts[name].ready

    def over(self, name: str) -> bool:
        """Also if it was never started."""
        return name not in self.parts or self.parts[name].over

    def is_unsteady(self, name: str) -> bool:
        """Whether it has ended and is not back, or has ended several times and was not back for long."""
        each = self.parts[name]
        again = each.restarts > 1 and time.monotonic() - each.started_at < STEADY_S
        return bool(each.last_words) and (not each.ready or again)

    def check(self) -> None:
        """Note what is ready and what has ended; start again what is due. RunError if that is hopeless."""
        now = time.monotonic()
        for each in self.parts.values():
            if each.over:
                continue
            if each.process.ended:
                self._ended(each, now)
            elif not each.ready and each.part.is_ready(each.process.output, each.began_at):
                each.ready, each.unready_starts = True, 0
                logger.info("action=ready process=%s after_s=%.1f", each.part.name, now - each.started_at)
        if now - self._looked_at_logs > LOOK_AT_LOGS_S:
            self._looked_at_logs = now
            self._bound_logs()

    def signal(self, name: str, signum: signal.Signals = signal.SIGTERM) -> None:
        if name in self.parts:
            self.parts[name].process.signal(signum)

    def stop(self, *, within_s: float, at_once: Callable[[], bool]) -> None:
        """Terminate every process and wait; `kill` ends the rest. Workers give their jobs back when `at_once`."""
        self.stopping = True
        hurried = False
        for each in self.parts.values():
            each.process.terminate()
        deadline = time.monotonic() + within_s
        while not all(each.process.ended for each in self.parts.values()) and time.monotonic() < deadline:
            if at_once() and not hurried:
                hurried, deadline = True, min(deadline, time.monotonic() + within_s / 2)
                for each in self.parts.values():
                    each.process.signal(signal.SIGQUIT if each.part.stop_at_once else signal.SIGTERM)
            time.sleep(TICK_S)

    def kill(self) -> None:
        """Kill every process with its descendants."""
        for each in self.parts.values():
            self._reap(each.process)
        self._guard.close()

    def _spawn(self, part: Part) -> ChildProcess:
        environment = self._environment
        variables = {"TMPDIR": str(self._guard.directory)}  # a killed process leaves files there
        if not part.own:
            environment = {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
            variables = {}
        process = ChildProcess(
            part.name, list(part.command), directory=self._logs, variables=variables, environment=environment,
            cwd=self._cwd, append=True,
        )  # fmt: skip
        self._guard.add(process)
        return process

    def _reap(self, process: ChildProcess) -> None:
        process.kill()
        self._guard.remove(process)

    def _ended(self, each: Supervised, now: float) -> None:
        """Called at every check from its end until it runs again."""
        if each.restart_at is None:
            each.ready, each.last_words = False, each.process.how_it_ended
            each.reason = reason_of(each.process)
            if self.stopping or self._may_end(each):
                each.over = True
                if not self.stopping:
                    logger.info(
                        "action=ended process=%s %s; it is not started again. It said: %s",
                        each.part.name, each.last_words, each.reason,
                    )  # fmt: skip
                return
            if full := full_disk(self._logs):  # it can write neither its log nor its files
                each.last_words += f" ({full})"
                each.unready_starts = 0
            if each.unready_starts >= STARTS_MOST:
                raise RunError(
                    f"{each.part.name} ended {each.unready_starts} times before it was ready. {tail(each.process)}"
                )
            each.pause_s = PAUSE_FIRST_S if now - each.started_at > STEADY_S else each.pause_s
            each.restart_at = now + each.pause_s
            logger.error(
                "action=died process=%s %s; it is started again in %.0f s. It said: %s",
                each.part.name, each.last_words, each.pause_s, each.reason,
            )  # fmt: skip
        elif self.stopping:
            each.over = True
        elif now >= each.restart_at:
            self._reap(each.process)
            each.began_at = time.time()
            each.process, each.started_at, each.restart_at = self._spawn(each.part), now, None
            each.pause_s = min(2 * each.pause_s, PAUSE_MOST_S)
            each.restarts += 1
            each.unready_starts += 1

    @staticmethod
    def _may_end(each: Supervised) -> bool:
        code = each.process.exit_code
        if each.part.ends == "run":  # a refusal is final, an unexpected error is not
            return code is not None and code >= 0 and TRACEBACK not in each.process.output_tail
        return each.part.ends == "done" and code == 0

    def _bound_logs(self) -> None:
        """The process goes on writing at the end of the emptied file: logs are opened for appending."""
        for each in self.parts.values():
            log = each.process.log
            if log.stat().st_size > LOG_BYTES:
                try:
                    shutil.copyfile(log, log.with_suffix(".log.1"))
                except OSError:  # the disk is full: the next look tries again
                    log.with_suffix(".log.1").unlink(missing_ok=True)
                    continue
                with log.open("r+b") as file:
                    file.truncate(0)
                each.process.log_start = 0


def last_line(process: ChildProcess) -> str:
    """The last one with a letter or a digit."""
    lines = process.output_tail.splitlines()
    return next((line for line in reversed(lines) if any(map(str.isalnum, line))), "(no output)")


def reason_of(process: ChildProcess) -> str:
    """The last line with an error if it ended with one, else the last line."""
    failed = (process.exit_code or 0) > 0
    errors = [line for line in process.output_tail.splitlines() if failed and ERROR.match(line)]
    return errors[-1] if errors else last_line(process)


def tail(process: ChildProcess) -> str:
    lines = process.output_tail.splitlines()[-TAIL_LINES:] or ["(no output)"]
    return "\n  ".join([f"The end of {process.log}:", *lines])
