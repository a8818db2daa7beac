"""One schedule: a run with its orchestrator, workers, trainer and Redis in this process, and the faults of its seed."""

import asyncio
import contextlib
import contextvars
import queue
import secrets
import shutil
import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from headpond.advantages import ESTIMATORS
from headpond.batches import read_manifests
from headpond.broker import redis_keys
from headpond.broker.queues import WorkerKind
from headpond.config import RunConfig
from headpond.errors import HeadpondError, IllegalTransition
from headpond.event_loop import offload
from headpond.inspection.audit import Scope, audit
from headpond.orchestrator import lock, loop, release, run_dir, shutdown, start
from headpond.orchestrator.duties import crash_points
from headpond.orchestrator.duties.housekeeping import Troubles
from headpond.orchestrator.exchange.redis_connection import Broker
from headpond.orchestrator.ledger import writer
from headpond.records.status import Status
from headpond.store import open_store
from headpond.store.files import FileStore
from headpond.tasks import agreement
from simulation import disk, invariants
from simulation.disk import Disk, LedgerConnection
from simulation.faults import Fault, drawn
from simulation.loop import PROCESS, START_S, OutOfTime, Process, SimulatedLoop
from simulation.redis_stand_in import Client, Command, Server
from simulation.settings import changed_settings, drawn_settings, merged
from simulation.threads import SimulatedEvent, SimulatedPool, SimulatedQueue, SimulatedThread
from simulation.trainer import SimulatedTrainer
from simulation.workers import SimulatedWorker

LIMIT_S = 2400.0
"""of simulated time: a run takes one or two minutes, its faults as long again"""
STARTS_MOST = 40
AUDIT_EVERY_S = 10.0
SETTLE_S = 90.0
"""after the run, at most"""
LEAVING_S = 10.0
"""an orchestrator that ends has tried for this long, at most, to delete its keys"""
Switch = Callable[[SimulatedWorker, bool], None]


class World:
    def __init__(self, seed: int, directory: Path, faults: list[Fault] | None = None) -> None:
        self.seed = seed
        draw = self.random("settings")
        self.directory = directory
        self._settings = drawn_settings(draw, directory)
        self.config = RunConfig.model_validate(self._settings)
        self.scoring: set[str] = set(self.config.environments) if draw.random() < 0.2 else set()
        """environments that score whole groups"""
        self.routed_experts = draw.random() < 0.4
        self.checkpoint_rate = draw.choice([0.0, 0.3, 1.0])
        self.more_steps = draw.choice([0, 0, 0, 1])
        self.hang_rate = draw.choice([0.0, 0.0, 0.02])
        self.numbers = np.random.default_rng(seed)
        self.schedule = drawn(self.random("faults"))
        self.faults = self.schedule if faults is None else faults
        self.loop = SimulatedLoop(LIMIT_S)
        self.redis = Server(self.loop, self.random("redis"))
        self.trainer = SimulatedTrainer(self)
        self.workers: list[SimulatedWorker] = []
        self._started_workers: list[SimulatedWorker] = []
        """those included that were replaced and still finish a job"""
        self._switches: list[tuple[Callable[[SimulatedWorker], bool], Switch]] = []
        self.run = ""
        self.policy_version = 0
        self.wall_offset_s = 0.0
        self.ledger_lost = False
        self.crash_at: list[Any] | None = None
        self.revoked: set[str] = set()
        self.replies_sent: list[bytes] = []
        self.notes: list[str] = []
        self.violations: list[str] = []
        self.stops: list[str] = []
        """why the run stopped by itself, before the last start"""
        self.error: BaseException | None = None
        """of the last violation, for its traceback"""
        self._over = False
        self._audited_at = 0.0
        self._waits: list[str] = []
        self.starts = 0
        self.planned = 0
        """groups, at the end"""
        self.delivered: list[str] = []
        """rollouts in manifests, at the end"""
        self.events = Counter[str]()
        """in the ledger, at the end; and workers excluded"""
        self.reasons: dict[str, int] = {}
        """of filtered rollouts, at the end"""
        self._disks: dict[Process, Disk] = {}
        self._commits = invariants.Commits(self)

    @property
    def simulated_s(self) -> float:
        return self.loop.now - START_S

    # what the others use

    def random(self, purpose: str) -> Random:
        return Random(f"{self.seed}/{purpose}")

    def note(self, text: str) -> None:
        self.notes.append(f"{self.simulated_s:8.2f} {text}")

    def violated(self, text: str) -> None:
        self.note(f"VIOLATED: {text}")
        self.violations.append(text)

    def new_process(self, name: str) -> Process:
        process = Process(name, self.loop)
        self._disks[process] = Disk(self.random(f"disk {name}"), self.loop.time)
        return process

    def live(self, process: Process, work: Coroutine[Any, Any, None]) -> None:
        """Workers and trainers retry whatever fails: an error that ends one is a violation."""

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None and process.alive:
                self.error = error
                self.violated(f"{process.name} ended with {_text(error)}")

        process.start(work).add_done_callback(ended)

    def disk_of(self, process: Process) -> Disk:
        return self._disks[process]

    @property
    def disk(self) -> Disk:
        return self.disk_of(self.orchestrator)

    @property
    def store_root(self) -> Path:
        return self.store.root

    @property
    def store(self) -> FileStore:
        store = open_store(self.config.store_url)
        assert isinstance(store, FileStore)
        return store

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Also if the process that calls this is dead by then."""
        self.loop.call_later(seconds, call, context=contextvars.Context())

    def lasting(self, random: Random, most_s: float) -> float:
        return random.uniform(0.5, most_s)

    def kill_orchestrator(self) -> None:
        self.orchestrator.kill()

    def signal_orchestrator(self, signum: int) -> None:
        if self.orchestrator.alive and signum in self.orchestrator.signals:
            self.orchestrator.start(_call(self.orchestrator.signals[signum]))

    def lose_ledger(self) -> None:
        self.orchestrator.kill()
        self.orchestrator.at_kill.append(lambda: shutil.rmtree(self.directory / "ledger", ignore_errors=True))
        self._commits.forget()
        self.ledger_lost = True

    def with_settings(self, changes: dict[str, Any]) -> RunConfig:
        return RunConfig.model_validate(merged(self._settings, changes))

    def change_settings(self, random: Random) -> None:
        """Before the next start, as an operator would: running workers are restarted a little later."""
        changes = changed_settings(random)
        self.note(f"settings changed: {changes}")
        self._settings = merged(self._settings, changes)
        self.config = RunConfig.model_validate(self._settings)
        self.orchestrator.kill()
        for worker in list(self.workers):
            self.later(random.uniform(0, 20), lambda worker=worker: self._restart(worker))

    def _restart(self, worker: SimulatedWorker) -> None:
        if worker.process.alive and worker in self.workers:
            self.replace_worker(worker)
            worker.process.kill()

    def add_worker(self, kind: WorkerKind, config: RunConfig | None = None) -> None:
        if self._over:
            return
        current, self.config = self.config, config or self.config
        worker = SimulatedWorker(self, kind, len(self._started_workers) + 1)
        self.config = current
        for concerns, switch in self._switches:
            if concerns(worker):
                switch(worker, True)
        self.workers.append(worker)
        self._started_workers.append(worker)
        worker.start()

    def replace_worker(self, worker: SimulatedWorker) -> None:
        """Another one starts in its place within a few seconds."""
        if worker in self.workers and len(self.workers) > 1:
            self.workers.remove(worker)
        self.later(self.random(f"replace {worker.node}").uniform(0.1, 5), lambda: self.add_worker(worker.kind))

    def switch_behaviour(self, concerns: Callable[[SimulatedWorker], bool], switch: Switch, seconds: float) -> None:
        entry = (concerns, switch)
        self._switches.append(entry)
        for worker in filter(concerns, self.workers):
            switch(worker, True)

        def end() -> None:
            self._switches.remove(entry)
            for worker in filter(concerns, self.workers):
                switch(worker, False)

        self.later(seconds, end)

    def undelivered_columns(self) -> list[Path]:
        """Files that neither a manifest nor the open step names."""
        named = {path for manifest in read_manifests(self.store).values() for path in _columns(manifest)}
        files = sorted(self.store_root.glob("rollouts/*/*/*/columns.safetensors"))
        plans = "".join(path.read_text() for path in self.store_root.glob("plans/*.step_*"))
        keys = [path.relative_to(self.store_root).as_posix() for path in files]
        return [path for path, key in zip(files, keys, strict=True) if key not in named and key not in plans]

    def delivered_columns(self) -> list[Path]:
        named = {path for manifest in read_manifests(self.store).values() for path in _columns(manifest)}
        return [self.store_root / key for key in sorted(named)]

    # playing

    def play(self) -> "World":
        with self._patched():
            try:
                self.loop.run_until_complete(self._main())
            except OutOfTime:
                self.violated(f"the run has not ended after {LIMIT_S:.0f} s; it waits for {self._waits}")
            finally:
                self._over = True
                for process in list(self._disks):
                    process.kill()
                with contextlib.suppress(OutOfTime):
                    self.loop.run_until_complete(asyncio.sleep(0.01))
                self.loop.close()
        return self

    async def _main(self) -> None:
        for kind in (WorkerKind.ROLLOUTS, WorkerKind.COMPUTE, WorkerKind.ROLLOUTS, WorkerKind.COMPUTE):
            self.add_worker(kind)
        self.trainer.start()
        for fault in self.faults:
            self.loop.call_at(START_S + fault.at_s, self._inject, fault)
        await self._run_until_done()
        if self.violations:
            return
        await self._settled()
        if self.more_steps:  # as an operator raises them after the end
            self._settings = merged(self._settings, {"steps": self.config.steps + self.more_steps})
            self.config = RunConfig.model_validate(self._settings)
            await self._run_until_done()
            await self._settled()
        await self._run_until_done()  # the same command again: a finished run sweeps what came late
        if self.redis.failed_until + LEAVING_S > self.loop.now:  # what could not be deleted expires
            await asyncio.sleep(max(redis_keys.ORCHESTRATOR_TTL_S, lock.TTL_S))
        if not self.violations:
            invariants.check_end(self)

    async def _settled(self) -> None:
        """Paused and late workers finish what they hold, and the trainer trains on every step."""
        await asyncio.sleep(2.0)
        for _ in range(int(SETTLE_S)):
            busy = [process for process in self._disks if process.alive and process.held is not None]
            working = [worker for worker in self._started_workers if worker.running and worker.process.alive]
            if not busy and not working and self.trainer.acked == self.config.steps - 1:
                break
            await asyncio.sleep(1.0)

    def _inject(self, fault: Fault) -> None:
        self.note(f"fault {fault}")
        fault.inject(self)

    async def _run_until_done(self) -> None:
        self._begun_again = 0
        while not self.violations:
            self.starts += 1
            self._begun_again += 1
            if self._begun_again > STARTS_MOST:
                self.violated(f"{STARTS_MOST} starts; the run stopped with: {self.stops[-3:]}")
                return
            if await self._one_start() == "done":
                return
            await asyncio.sleep(self.random(f"start {self.starts}").uniform(0.1, 8.0))

    async def _one_start(self) -> str | None:
        """The phase in which the orchestrator ended, None if it was killed or stopped with an error."""
        self.orchestrator = self.new_process(f"orchestrator-{self.starts}")
        ended = self.loop.create_future()
        self.orchestrator.at_kill.append(lambda: ended.done() or ended.set_result(None))
        task = self.orchestrator.start(self._orchestrate())
        task.add_done_callback(lambda _: ended.done() or ended.set_result(None))
        self.note(f"start {self.starts}")
        await ended
        if not self.orchestrator.alive:
            self.note("the orchestrator was killed")
            return None
        self.orchestrator.kill()  # nothing of it may run on
        if error := task.exception():
            self._stopped_by(error)
            return None
        self.note(f"the orchestrator ended: {task.result().phase}")
        invariants.check_counts(self, task.result())
        return task.result().phase

    def _stopped_by(self, error: BaseException) -> None:
        self.note(f"the orchestrator stopped: {_text(error)}")
        self.stops.append(_text(error))
        if not isinstance(error, HeadpondError) or isinstance(error, IllegalTransition) or "bug" in str(error):
            self.violated(f"the run ended with {_text(error)}")
            self.error = error

    async def _orchestrate(self) -> Status:
        """`headpond.orchestrator.start.run`, without the lock file and the HTTP endpoint."""
        config = self.config
        run_dir.create_directories(config)
        self.run = run_dir.begin_or_resume(config)
        batch_phase = ESTIMATORS[config.advantages.estimator].batch is not None
        return await start._run(config, self.run, self._on_status, None, batch_phase=batch_phase, engine_check=None)

    def _on_status(self, status: Status) -> None:
        self._waits = status.waiting_for
        self.events.update({"excluded worker (seconds)": len(status.excluded_workers)})
        if self.loop.now > self._audited_at + AUDIT_EVERY_S:
            self._audited_at = self.loop.now
            self.later(0.0, self._audit)
        if not status.rollouts["balanced"]:
            self.violated(f"the orchestrator's counts are not balanced: {status.rollouts}, {status.states}")

    def _audit(self) -> None:
        """At any moment of a run."""
        result = audit(self.config.run_dir, scope=Scope.NEW_FILES) if self.config.ledger_path.exists() else None
        if result and not result["balanced"]:
            self.violated(f"an audit of the running run: {result['problems'][:5]}")

    # what the product calls instead of the operating system

    def _passed(self, point: str) -> None:
        if self.crash_at and self.crash_at[0] == point:
            self.crash_at[1] -= 1
            if self.crash_at[1] <= 0:
                self.crash_at = None
                self.note(f"killed at {point}")
                disk.kill_this_process()

    def _revoke(self, task_ids: list[str]) -> None:
        self.revoked |= set(task_ids)
        for worker in self.workers:
            for task in task_ids:
                if running := worker.running.get(task):
                    running.cancel()

    @contextmanager
    def _patched(self) -> Iterator[None]:
        world, names = self, self.random("names")

        class OrchestratorClient(Client):
            def _execute(self, commands: list[Command]) -> list[Any]:
                for name, arguments, _ in commands:
                    if name == "lpush":
                        world._commits.check_published(arguments[1:])
                return super()._execute(commands)

        class SimulatedBroker(Broker):
            def __init__(self, url: str, troubles: Troubles) -> None:
                super().__init__(url, troubles)
                self.client = OrchestratorClient(world.redis)  # pyright: ignore[reportAttributeAccessIssue]

        def disk_of() -> Disk | None:
            process = PROCESS.get()
            return world._disks[process] if process else None

        SimulatedThread.delays, SimulatedThread.loop = self.random("threads"), self.loop
        LedgerConnection.committed = staticmethod(self._commits.check)
        offload._pools[self.loop] = SimulatedPool(self.loop, self.random("pools"))  # pyright: ignore[reportArgumentType]
        replaced: list[tuple[Any, str, Any]] = [
            (time, "monotonic", lambda: self.loop.now),
            (time, "time", lambda: self.loop.now + self.wall_offset_s),
            (uuid, "uuid4", lambda: uuid.UUID(int=names.getrandbits(128), version=4)),
            (secrets, "token_hex", lambda size=8: names.randbytes(size).hex()),
            (writer, "queue", SimpleNamespace(SimpleQueue=SimulatedQueue, Empty=queue.Empty)),
            (writer, "threading", SimpleNamespace(Thread=SimulatedThread, Event=SimulatedEvent)),
            (start, "Broker", SimulatedBroker),
            (shutdown, "_revoke", self._revoke),
            (crash_points, "passed", self._passed),
            (release, "SWEEP_EVERY_S", 11.0),  # often, so that it meets every other duty
            (loop, "TRAINER_POLL_S", 1.0),
            (agreement, "release", lambda: "simulated"),
        ]
        assert (writer.queue, writer.threading) == (queue, threading)
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", RuntimeWarning)  # of calls that a killed process has not begun to await
            for module, name, value in replaced:
                stack.enter_context(mock.patch.object(module, name, value))
            stack.enter_context(disk.installed(self.directory / "run", disk_of))
            yield
        offload._pools.pop(self.loop, None)


def _text(error: BaseException) -> str:
    inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
    return _text(inner) if inner is not None else f"{type(error).__name__}: {error}"


def _columns(manifest: Any) -> set[str]:
    return {rollout.columns.key for rollout in manifest.plan.rollouts}


async def _call(call: Callable[[], object]) -> None:
    call()
