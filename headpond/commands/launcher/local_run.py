"""A run on this machine from its first process to its last: start, progress, interrupts, stop."""

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from headpond.batches.signals import read_status
from headpond.commands.facts import Fact, counted
from headpond.commands.interrupts import Interrupts
from headpond.commands.launcher import parts
from headpond.commands.launcher.broker import RunBroker
from headpond.commands.launcher.ports import free_port, kept_port
from headpond.commands.launcher.supervisor import FAILURES_MOST, Supervisor, last_line
from headpond.commands.modules import module_directories
from headpond.commands.output import StatusCallback
from headpond.config import RunConfig
from headpond.errors import RunError, RunLocked
from headpond.inspection import up_file
from headpond.inspection.run_state import last_status
from headpond.orchestrator.run_dir import explained
from headpond.records.status import Status

logger = logging.getLogger("headpond.up")

TICK_S = 0.1
STOP_S = 15.0  # idle workers take about one second; a trainer or an engine may take longer
LOG_EVERY_S = 10.0
LOOK_S = 2.0  # between two looks for the orchestrator of a run that was joined
ALONE_S = 300.0  # after which workers that have joined a run and see no orchestrator end
DONE = "done"


class LocalRun:
    def __init__(
        self,
        settings: RunConfig,
        interrupts: Interrupts,
        *,
        config: Path | None,
        environment: Mapping[str, str],
        workers: int = 1,
        joined: str | None = None,
        failures_most: int = FAILURES_MOST,
        limit_s: float | None = None,
        keep_redis: bool = False,
    ) -> None:
        """Prepare the processes. `environment` is that of all, `workers` counts rollout workers, `joined` is the
        address of the run's Redis on another host. After `failures_most` ends of one process in a row the run ends,
        after `limit_s` it is drained. `keep_redis` keeps the files of Redis of a run that is done."""
        self._settings = settings
        self._interrupts = interrupts
        self._workers = workers
        self._joined = joined
        self._limit_s = limit_s
        self._keep_redis = keep_redis
        self._run_dir = settings.run_dir
        self._broker = RunBroker(settings, joined=joined)
        self._logs = settings.run_dir / "logs"
        variables = _variables(config, settings.run_dir, environment)
        self._supervisor = Supervisor(self._logs, variables, Path.cwd(), failures_most=failures_most)
        # state of the processes, which the status lacks. Read by the thread that draws.
        self.facts: list[Fact] = [Fact("starting", "redis")]
        self._hurried = False
        self._started_at = self._logged_at = self._seen_at = self._looked_at = time.monotonic()
        self._began_at = time.time()
        self._dashboard = ""
        self._written_ends: list[up_file.EndedProcess] | None = None
        self.status: Status | None = None
        self.stopped_by = ""  # why the run was drained before its last step

    @property
    def restarts(self) -> dict[str, int]:
        """process -> how often it was started again"""
        restarts = {name: child.restarts for name, child in self._supervisor.parts.items()}
        return {**restarts, "redis": self._broker.restarts}

    def run(self, on_status: StatusCallback) -> None:
        """Run until the run is done, or stopped. Every process has ended on return."""
        with explained(self._run_dir):
            self._logs.mkdir(parents=True, exist_ok=True)
        with locked(self._run_dir / up_file.LOCK):
            try:
                self._drive(on_status)
                self._supervisor.stop(within_s=STOP_S, at_once=lambda: self._interrupts.twice)
            finally:
                self._supervisor.kill()
                self._broker.stop()
        self.status = self._read_status() or self.status
        self._raise_refusal()
        if self._is_done() and not (self._joined or self._keep_redis):
            shutil.rmtree(self._run_dir / "redis", ignore_errors=True)

    def _drive(self, on_status: StatusCallback) -> None:
        self._broker.start()
        self._supervisor.add_variables(HEADPOND_REDIS_URL=self._broker.url)
        logger.info("action=ready process=redis url=%s", self._broker)
        starting = self._start_in_order()
        while not self._is_over() and len(self._interrupts.signals) <= 2:
            if not self._supervisor.stopping:
                next(starting, None)
                if self._broker.check():
                    logger.error("action=died process=redis; it was started again, and keeps its data")
            self._supervisor.check()
            self._write_ends()
            self._show(on_status)
            self._drain_if_due()
            time.sleep(TICK_S)

    def _start_in_order(self) -> Iterator[None]:
        """Start processes in the order in which they need each other. Yield while one is not ready."""
        settings, supervisor, joined = self._settings, self._supervisor, self._joined
        if settings.engine.command and not joined:
            port = free_port() if parts.PORT in settings.engine.command else None
            url = f"http://127.0.0.1:{port}" if port else settings.engine.urls[0]
            supervisor.start(parts.engine(settings, url, port))
            while not supervisor.ready("engine"):
                yield
            supervisor.add_variables(**({"HEADPOND_ENGINE__URLS": url} if port else {}))
        if not settings.sessions.urls:
            port = free_port()
            supervisor.start(parts.sessions(port))
            supervisor.add_variables(HEADPOND_SESSIONS__URLS=f"http://127.0.0.1:{port}")
        if not joined:
            supervisor.start(parts.orchestrator(lambda since: self._read_status(since) is not None))
        for worker in parts.workers(settings, self._workers, os.cpu_count() or 1):
            supervisor.start(worker)
        if joined:
            return
        if settings.trainer.command:
            while self._has_an_earlier_end():
                yield
            supervisor.start(parts.trainer(settings))
        port = kept_port(self._run_dir / "dashboard.port")
        self._dashboard = f"http://127.0.0.1:{port}"
        while not supervisor.ready("orchestrator"):  # it has written the files that the dashboard reads
            yield
        supervisor.start(parts.dashboard(str(self._run_dir), port))

    def _is_done(self) -> bool:
        return (status := self._read_status()) is not None and status.phase == DONE

    def _is_over(self) -> bool:
        supervisor = self._supervisor
        if self._joined:
            workers_ended = all(child.process.ended for child in supervisor.parts.values() if child.part.stop_at_once)
            return (bool(self.stopped_by) and workers_ended) or self._is_alone()
        if "orchestrator" not in supervisor.parts:
            return bool(self.stopped_by)
        if not supervisor.over("orchestrator"):
            return False
        trainer_is_due = bool(self._settings.trainer.command) and "trainer" not in supervisor.parts
        trainer_goes_on = trainer_is_due or not supervisor.over("trainer")
        return bool(self.stopped_by) or not self._is_done() or not trainer_goes_on

    def _has_an_earlier_end(self) -> bool:
        """Whether a trainer would read that the run has ended, before the orchestrator goes on with more steps."""
        written = read_status(self._run_dir)
        return written is not None and written.ended and not self._supervisor.over("orchestrator")

    def _is_alone(self) -> bool:
        """Whether workers that have joined a run have seen no orchestrator for ALONE_S."""
        now = time.monotonic()
        if now - self._looked_at > LOOK_S:
            self._looked_at = now
            self._seen_at = now if self._broker.has_orchestrator() else self._seen_at
        alone = now - self._seen_at > ALONE_S
        if alone:
            logger.warning("action=alone no orchestrator was seen for %.0f s: the workers end", ALONE_S)
        return alone

    def _drain_if_due(self) -> None:
        running_s = time.monotonic() - self._started_at
        late = self._limit_s is not None and running_s > self._limit_s and not self._is_done()
        due = self._interrupts.why or ("stopped by its time limit" if late else "")
        if due and not self.stopped_by:
            self.stopped_by, self._supervisor.stopping = due, True
            logger.warning(
                "action=draining %s: running jobs finish, for at most %g s (recovery.drain_s), nothing new begins; "
                "Ctrl-C again stops at once",
                due, self._settings.recovery.drain_s,
            )  # fmt: skip
            self._signal_first(signal.SIGTERM)
        if self._interrupts.twice and not self._hurried:
            self._hurried = True
            logger.warning("action=stopping running jobs are given back and run again after a resume")
            self._signal_first(signal.SIGQUIT)

    def _signal_first(self, to_workers: signal.Signals) -> None:
        """Signal what finishes running jobs: the orchestrator, for which the workers stay, or joined workers."""
        if not self._joined:
            self._supervisor.signal("orchestrator")
            return
        for name, child in self._supervisor.parts.items():
            if child.part.stop_at_once:
                self._supervisor.signal(name, to_workers)

    def _show(self, on_status: StatusCallback) -> None:
        self.facts = list(self._current_facts())
        if self._supervisor.ready("orchestrator") and (status := self._read_status()):
            self.status = status
            on_status(status)
        if self.status and time.monotonic() - self._logged_at > LOG_EVERY_S:
            self._logged_at = time.monotonic()
            waiting = "".join(f" waiting_for={cause!r}" for cause in self.status.waiting_for)
            logger.info(
                "action=progress step=%d/%d rollouts_per_s=%.1f%s",
                self.status.step, self.status.steps, self.status.rollouts_per_s, waiting,
            )  # fmt: skip

    def _write_ends(self) -> None:
        """Write up.json, for `headpond why`, when it changes."""
        ends = [
            up_file.EndedProcess(
                name=name, ended=child.last_end, starts=child.restarts, returns=not child.over, reason=child.reason,
                log=str(child.process.log),
            )
            for name, child in self._supervisor.parts.items()
            if name != "orchestrator" and child.unsteady
        ]  # fmt: skip
        if ends != self._written_ends:
            with contextlib.suppress(OSError):  # a full disk: tried again at the next look
                up_file.write(self._run_dir, ends)
                self._written_ends = ends

    def _current_facts(self) -> Iterator[Fact]:
        children = self._supervisor.parts
        for state in ("starting", "died", "ready", "ended"):
            names = [name for name, child in children.items() if child.state == state]
            if names:
                yield Fact(state, ", ".join(["redis", *names] if state == "ready" else names), alarm=state == "died")
        for name, child in children.items():
            if child.restarts or child.restart_at is not None:
                times = f"; started again {counted(child.restarts, 'time')}" if child.restarts else ""
                yield Fact("", f"{name} {child.last_end}{times}: {child.process.log}", alarm=True)
        if "trainer" in children:
            yield Fact("trainer", last_line(children["trainer"].process))
        if self._supervisor.ready("dashboard"):
            yield Fact("dashboard", self._dashboard)

    def _read_status(self, since: float | None = None) -> Status | None:
        """Return the status that was written since then, or since this run began."""
        status = last_status(self._run_dir)
        return status if (status.at or 0.0) >= (since or self._began_at) else None

    def _raise_refusal(self) -> None:
        """Raise the error with which the orchestrator has ended the run."""
        orchestrator = self._supervisor.parts.get("orchestrator")
        if orchestrator is None or self.stopped_by or not orchestrator.process.exit_code:
            return
        lines = orchestrator.process.output_tail.splitlines()
        errors = [line.removeprefix("headpond: ") for line in lines if line.startswith("headpond: ")]
        raise RunError(errors[-1] if errors else orchestrator.process.end_of_log)


def _variables(config: Path | None, run_dir: Path, environment: Mapping[str, str]) -> dict[str, str]:
    paths = [*module_directories(config), environment.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    if config:
        variables["HEADPOND_CONFIG"] = str(config.resolve())
    return {**environment, **variables, "HEADPOND_RUN_DIR": str(run_dir.resolve())}


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
