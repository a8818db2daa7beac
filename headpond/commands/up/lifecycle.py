"""A run on this machine from its first process to its last: start, progress, interrupts, stop."""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from headpond.batches.signals import read_status
from headpond.commands.facts import Fact, counted
from headpond.commands.interrupts import Interrupts
from headpond.commands.modules import module_directories
from headpond.commands.output import StatusCallback
from headpond.commands.up import parts
from headpond.commands.up.broker import RunBroker
from headpond.commands.up.ports import free_port, kept_port
from headpond.commands.up.supervisor import Supervisor, last_line, tail
from headpond.config import RunConfig
from headpond.errors import RunError, RunLocked
from headpond.inspection import up_file
from headpond.orchestrator.run_dir import explained

logger = logging.getLogger("headpond.up")

TICK_S = 0.1
STOP_S = 15.0  # idle workers take about one second; a trainer or an engine may take longer
LOG_EVERY_S = 10.0
LOOK_S = 2.0  # between two looks for the orchestrator of a run that was joined
ALONE_S = 300.0  # after which workers that have joined a run and see no orchestrator end
DONE = "done"


@dataclass(frozen=True, kw_only=True)
class Options:
    config: Path | None
    settings: RunConfig
    workers: int
    joined: str | None
    """address of the run's Redis on another host"""
    variables: dict[str, str]
    """settings that flags have overridden, as HEADPOND_* variables"""

    @property
    def run_dir(self) -> Path:
        return self.settings.run_dir


class Up:
    def __init__(self, options: Options, interrupts: Interrupts) -> None:
        self._options = options
        self._interrupts = interrupts
        self._settings = options.settings
        self._broker = RunBroker(options.settings, joined=options.joined)
        self._logs = options.run_dir / "logs"
        self._facts: list[Fact] = [Fact("starting", "redis")]
        self._draining = self._hurried = False
        self._logged_at = self._seen_at = self._looked_at = time.monotonic()
        self._began_at = time.time()
        self._dashboard = ""
        self._told: list[up_file.EndedProcess] | None = None
        self.status: dict[str, Any] = {}
        self.restarts: dict[str, int] = {}
        """process -> how often it was started again"""

    def facts(self) -> list[Fact]:
        """What the status lacks. Called by the thread that draws."""
        return self._facts

    def run(self, on_status: StatusCallback) -> None:
        """Run until the run is done, or stopped. Every process has ended on return."""
        with explained(self._options.run_dir):
            self._logs.mkdir(parents=True, exist_ok=True)
        with locked(self._options.run_dir / up_file.LOCK):
            supervisor = Supervisor(self._logs, self._environment(), Path.cwd())
            try:
                self._drive(supervisor, on_status)
                supervisor.stop(within_s=STOP_S, at_once=lambda: self._interrupts.twice)
            finally:
                supervisor.kill()
                self._broker.stop()
                self.restarts = {name: each.restarts for name, each in supervisor.parts.items()}
                self.restarts["redis"] = self._broker.restarts
        self.status = self._read_status() or self.status
        self._raise_refusal(supervisor)
        if self.status.get("phase") == DONE and not self._options.joined:
            shutil.rmtree(self._options.run_dir / "redis", ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        paths = [*module_directories(self._options.config), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        if self._options.config:
            variables["HEADPOND_CONFIG"] = str(self._options.config.resolve())
        variables["HEADPOND_RUN_DIR"] = str(self._options.run_dir.resolve())
        return {**os.environ, **self._options.variables, **variables}

    def _drive(self, supervisor: Supervisor, on_status: StatusCallback) -> None:
        self._broker.start()
        supervisor.tell(HEADPOND_REDIS_URL=self._broker.url)
        logger.info("action=ready process=redis url=%s", self._broker)
        starting = self._start_in_order(supervisor)
        while not self._is_over(supervisor):
            if not supervisor.stopping:
                next(starting, None)
                if self._broker.check():
                    logger.error("action=died process=redis; it was started again, and keeps its data")
            supervisor.check()
            self._tell_ends(supervisor)
            self._show(supervisor, on_status)
            self._obey_interrupts(supervisor)
            if len(self._interrupts.signals) > 2:
                return
            time.sleep(TICK_S)

    def _start_in_order(self, supervisor: Supervisor) -> Iterator[None]:
        """Start what others need first. Yields while it waits."""
        settings, joined = self._settings, self._options.joined
        if settings.engine.command and not joined:
            port = free_port() if parts.PORT in settings.engine.command else None
            url = f"http://127.0.0.1:{port}" if port else settings.engine.urls[0]
            supervisor.start(parts.engine(settings, url, port))
            while not supervisor.ready("engine"):
                yield
            supervisor.tell(**({"HEADPOND_ENGINE__URLS": url} if port else {}))
        if not settings.sessions.urls:
            port = free_port()
            supervisor.start(parts.sessions(port))
            supervisor.tell(HEADPOND_SESSIONS__URLS=f"http://127.0.0.1:{port}")
        if not joined:
            supervisor.start(parts.orchestrator(lambda since: bool(self._read_status(since))))
        for worker in parts.workers(settings, self._options.workers, os.cpu_count() or 1):
            supervisor.start(worker)
        if joined:
            return
        if settings.trainer.command:
            while self._tells_an_earlier_end(supervisor):
                yield
            supervisor.start(parts.trainer(settings))
        port = kept_port(self._options.run_dir / "dashboard.port")
        self._dashboard = f"http://127.0.0.1:{port}"
        while not supervisor.ready("orchestrator"):  # it has written the files that the dashboard reads
            yield
        supervisor.start(parts.dashboard(str(self._options.run_dir), port))

    def _is_over(self, supervisor: Supervisor) -> bool:
        if self._options.joined:
            return (bool(self._interrupts.signals) and _workers_over(supervisor)) or self._alone()
        if not supervisor.parts or "orchestrator" not in supervisor.parts:
            return bool(self._interrupts.signals)
        if not supervisor.over("orchestrator"):
            return False
        finished = self._read_status().get("phase") == DONE and not self._interrupts.signals
        due = bool(self._settings.trainer.command) and "trainer" not in supervisor.parts
        return not finished or (not due and supervisor.over("trainer"))

    def _tells_an_earlier_end(self, supervisor: Supervisor) -> bool:
        """Whether a trainer would read that the run has ended, before the orchestrator goes on with more steps."""
        told = read_status(self._options.run_dir)
        return told is not None and told.ended and not supervisor.over("orchestrator")

    def _alone(self) -> bool:
        """Whether workers that have joined a run have seen no orchestrator for ALONE_S."""
        now = time.monotonic()
        if now - self._looked_at > LOOK_S:
            self._looked_at = now
            self._seen_at = now if self._broker.has_orchestrator() else self._seen_at
        alone = now - self._seen_at > ALONE_S
        if alone:
            logger.warning("action=alone no orchestrator was seen for %.0f s: the workers end", ALONE_S)
        return alone

    def _obey_interrupts(self, supervisor: Supervisor) -> None:
        if self._interrupts.signals and not self._draining:
            self._draining = supervisor.stopping = True
            drain_s = self._settings.recovery.drain_s
            logger.warning(
                "action=draining running jobs finish, for at most %g s (recovery.drain_s), nothing new begins; "
                "again: stop at once",
                drain_s,
            )
            self._signal_first(supervisor)
        if self._interrupts.twice and not self._hurried:
            self._hurried = True
            logger.warning("action=stopping running jobs are given back and run again after a resume")
            self._signal_first(supervisor)

    def _signal_first(self, supervisor: Supervisor) -> None:
        """To what finishes running jobs: the orchestrator, for which the workers stay, or joined workers."""
        if not self._options.joined:
            supervisor.signal("orchestrator")
            return
        for name, each in supervisor.parts.items():
            if each.part.stop_at_once:
                supervisor.signal(name, signal.SIGQUIT if self._hurried else signal.SIGTERM)

    def _show(self, supervisor: Supervisor, on_status: StatusCallback) -> None:
        self._facts = list(self._current_facts(supervisor))
        if supervisor.ready("orchestrator") and (status := self._read_status()):
            self.status = status
            on_status(status)
        if time.monotonic() - self._logged_at > LOG_EVERY_S:
            self._logged_at = time.monotonic()
            if status := self.status:
                waiting = "".join(f" waiting_for={cause!r}" for cause in status["waiting_for"])
                speed = status["rollouts_per_s"]
                logger.info(
                    "action=progress step=%d/%d rollouts_per_s=%.1f%s", status["step"], status["steps"], speed, waiting
                )

    def _tell_ends(self, supervisor: Supervisor) -> None:
        """In up.json, for `headpond why`, when it changes."""
        ended = [
            up_file.EndedProcess(
                name=name, ended=each.last_words, starts=each.restarts, returns=not each.over, reason=each.reason,
                log=str(each.process.log),
            )
            for name, each in supervisor.parts.items()
            if name != "orchestrator" and supervisor.is_unsteady(name)
        ]  # fmt: skip
        if ended != self._told:
            with contextlib.suppress(OSError):  # a full disk: tried again at the next look
                up_file.write(self._options.run_dir, ended)
                self._told = ended

    def _current_facts(self, supervisor: Supervisor) -> Iterator[Fact]:
        by_state: dict[str, list[str]] = {}
        for name, each in supervisor.parts.items():
            died = each.restart_at is not None
            state = "ended" if each.over else "died" if died else "ready" if each.ready else "starting"
            by_state.setdefault(state, ["redis"] if state == "ready" else []).append(name)
        for state in ("starting", "died", "ready", "ended"):
            if names := by_state.get(state):
                yield Fact(state, ", ".join(names), alarm=state == "died")
        for name, each in supervisor.parts.items():
            if each.restarts or each.restart_at is not None:
                times = f"; started again {counted(each.restarts, 'time')}" if each.restarts else ""
                yield Fact("", f"{name} {each.last_words}{times}: {each.process.log}", alarm=True)
        if "trainer" in supervisor.parts:
            yield Fact("trainer", last_line(supervisor.parts["trainer"].process))
        if supervisor.ready("dashboard"):
            yield Fact("dashboard", self._dashboard)

    def _read_status(self, since: float | None = None) -> dict[str, Any]:
        """The status that was written since then, or since `up` began; empty before."""
        try:
            status = json.loads((self._options.run_dir / "status.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return status if status["at"] >= (since or self._began_at) else {}

    def _raise_refusal(self, supervisor: Supervisor) -> None:
        """The error with which the orchestrator has ended the run."""
        orchestrator = supervisor.parts.get("orchestrator")
        if orchestrator is None or self._interrupts.signals:
            return
        process = orchestrator.process
        if process.exit_code:
            said = [line for line in process.output_tail.splitlines() if line.startswith("headpond: ")]
            raise RunError(said[-1].removeprefix("headpond: ") if said else tail(process))


def _workers_over(supervisor: Supervisor) -> bool:
    return all(each.process.ended for each in supervisor.parts.values() if each.part.stop_at_once)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    """RunLocked while another `headpond up` uses the run directory."""
    with explained(path.parent):
        opened = path.open("ab")
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunLocked(
                f"another `headpond up` runs in {path.parent}: stop it, or set run_dir to another"
            ) from None
        yield file
