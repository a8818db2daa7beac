"""Starts processes, starts them again when they die, with a growing pause, and stops all of them."""

import logging
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headpond.commands.launcher.parts import Part
from headpond.errors import RunError
from headpond.inspection.status import full_disk
from headpond.processes.child_process import ChildProcess, Guard
from headpond.processes.privacy import PREFIX

logger = logging.getLogger("headpond.up")

PAUSE_FIRST_S, PAUSE_MOST_S = 1.0, 30.0
STEADY_S = 60.0  # a process that has run for this long begins again with the first pause
FAILURES_MOST = 5  # in a row: after that many, the process would never get ready
LOG_BYTES = 16 << 20  # of one log; the one before it is kept as NAME.log.1
LOOK_AT_LOGS_S = 5.0
TICK_S = 0.05
TRACEBACK = "Traceback (most recent call last)"
# Matches the line of a Python error with its text. torchrun writes its own report behind that, without the reason.
ERROR = re.compile(r"(?:\[[^]]*\]:? *)?[\w.]*(?:Error|Exception)\b: *\S")


@dataclass(kw_only=True)
class Supervised:
    part: Part
    process: ChildProcess
    ready: bool = False
    over: bool = False  # it has ended and is not started again
    started_at: float
    began_at: float  # the same as a time of day, to compare with those of files
    restarts: int = 0
    failures: int = 0  # ends in a row: zero when it gets ready
    restart_at: float | None = None
    pause_s: float = PAUSE_FIRST_S
    last_end: str = ""  # how its last process ended
    reason: str = ""  # the line of its output that explains the end

    @property
    def state(self) -> str:
        died = self.restart_at is not None
        return "ended" if self.over else "died" if died else "ready" if self.ready else "starting"

    @property
    def unsteady(self) -> bool:
        """Whether it has ended and is not back, or has ended several times and was not back for long."""
        again = self.restarts > 1 and time.monotonic() - self.started_at < STEADY_S
        return bool(self.last_end) and (not self.ready or again)


class Supervisor:
    """Every call from the main thread: children end with the thread that starts them."""

    def __init__(
        self, logs: Path | None, environment: Mapping[str, str], cwd: Path, *, failures_most: float = FAILURES_MOST
    ) -> None:
        """`logs`: directory of the processes' output; None: that of this process. `failures_most`: a process that ends
        so often in a row raises RunError; `math.inf`: never."""
        self._logs = logs
        self._environment = dict(environment)
        self._cwd = cwd
        self._failures_most = failures_most
        self._guard = Guard()
        self._looked_at_logs = 0.0
        self.stopping = False  # whether a process that ends stays ended
        self.parts: dict[str, Supervised] = {}

    def add_variables(self, **variables: str) -> None:
        """Extend the environment of the processes that start from now on."""
        self._environment |= variables

    def start(self, part: Part) -> None:
        process = self._spawn(part)
        self.parts[part.name] = Supervised(
            part=part, process=process, began_at=time.time(), started_at=time.monotonic()
        )
        logger.info("action=starting process=%s log=%s", part.name, process.log)

    def ready(self, name: str) -> bool:
        return name in self.parts and self.parts[name].ready

    def over(self, name: str) -> bool:
        """Return whether the process has ended for good, or was never started."""
        return name not in self.parts or self.parts[name].over

    def check(self) -> None:
        """Note what is ready and what has ended; start again what is due. RunError if that is hopeless."""
        now = time.monotonic()
        for child in self.parts.values():
            if child.over:
                continue
            if child.process.ended:
                self._handle_end(child, now)
            elif not child.ready and child.part.is_ready(child.process.output, child.began_at):
                child.ready, child.failures = True, 0
                logger.info("action=ready process=%s after_s=%.1f", child.part.name, now - child.started_at)
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
        for child in self.parts.values():
            child.process.terminate()
        deadline = time.monotonic() + within_s
        while not all(child.process.ended for child in self.parts.values()) and time.monotonic() < deadline:
            if at_once() and not hurried:
                hurried, deadline = True, min(deadline, time.monotonic() + within_s / 2)
                for child in self.parts.values():
                    child.process.signal(signal.SIGQUIT if child.part.stop_at_once else signal.SIGTERM)
            time.sleep(TICK_S)

    def kill(self) -> None:
        """Kill every process with its descendants."""
        for child in self.parts.values():
            self._reap(child.process)
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

    def _handle_end(self, child: Supervised, now: float) -> None:
        """Called at every check from its end until it runs again."""
        if child.restart_at is None:
            child.ready, child.last_end, child.reason = False, child.process.how_it_ended, reason_of(child.process)
            child.over = self.stopping or self._may_end(child)
            if not child.over:
                self._plan_restart(child, now)
            elif not self.stopping:
                logger.info(
                    "action=ended process=%s %s; it is not started again. Its output ends with: %s",
                    child.part.name, child.last_end, child.reason,
                )  # fmt: skip
        elif self.stopping:
            child.over = True
        elif now >= child.restart_at:
            self._reap(child.process)
            child.process, child.restart_at = self._spawn(child.part), None
            child.began_at, child.started_at = time.time(), now
            child.pause_s = min(2 * child.pause_s, PAUSE_MOST_S)
            child.restarts += 1

    def _plan_restart(self, child: Supervised, now: float) -> None:
        child.failures += 1
        if self._logs and (full := full_disk(self._logs)):  # it can write neither its log nor its files
            child.last_end += f" ({full})"
            child.failures = 0
        if child.failures >= self._failures_most:
            times = f", {child.failures} times in a row" if child.failures > 1 else ""
            raise RunError(f"the {child.part.name} {child.last_end}{times}. {child.process.end_of_log}")
        child.pause_s = PAUSE_FIRST_S if now - child.started_at > STEADY_S else child.pause_s
        child.restart_at = now + child.pause_s
        logger.error(
            "action=died process=%s %s; it is started again in %.0f s. Its output ends with: %s",
            child.part.name, child.last_end, child.pause_s, child.reason,
        )  # fmt: skip

    @staticmethod
    def _may_end(child: Supervised) -> bool:
        code = child.process.exit_code
        if child.part.ends == "run":  # a refusal is final, an unexpected error is not
            return code is not None and code >= 0 and TRACEBACK not in child.process.output_tail
        return child.part.ends == "done" and code == 0

    def _bound_logs(self) -> None:
        """The process goes on writing at the end of the emptied file: logs are opened for appending."""
        for child in self.parts.values():
            log = child.process.log
            if log.stat().st_size > LOG_BYTES:
                try:
                    shutil.copyfile(log, log.with_suffix(".log.1"))
                except OSError:  # the disk is full: the next look tries again
                    log.with_suffix(".log.1").unlink(missing_ok=True)
                    continue
                with log.open("r+b") as file:
                    file.truncate(0)
                child.process.log_start = 0


def last_line(process: ChildProcess) -> str:
    """The last one with a letter or a digit."""
    lines = process.output_tail.splitlines()
    return next((line for line in reversed(lines) if any(map(str.isalnum, line))), "(no output)")


def reason_of(process: ChildProcess) -> str:
    """The last line with an error if it ended with one, else the last line."""
    failed = (process.exit_code or 0) > 0
    errors = [line for line in process.output_tail.splitlines() if failed and ERROR.match(line)]
    return errors[-1] if errors else last_line(process)
