"""What a schedule of faults is played on: a run with all its processes, started, watched and ended.

`NoopWorld` has no-op rollouts, many of them. `EngineWorld` has an engine, real stages and files, and a trainer that
reads every step; `AgentWorld` plays them through a session server. The ledger and the store are on a disk of their own
where mounting is permitted. Each process reaches Redis over a link that can be cut, and runs with `fault_shim.c`.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from headpond.records.status import Status
from support.cluster import BIN, Cluster, Process, toml
from support.fault_shim import Faults
from support.partitions import Links
from support.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[3]
DISK_MB = 96
STEPS = 100_000
"""More than a schedule plays: the run ends when its last resume says so."""
LAST_STEPS = 2
"""Steps that the run delivers after the last fault."""
RESTARTS = 3
"""Of an orchestrator that has ended with an error which the same command repairs."""
IDLE_S = 6.0
"""Above every pause of a chat, and short enough that a schedule can wait for it."""
POLL_S = 0.1
"""Rarer than in other tests: a poll opens the ledger, and the cores are busy with the run."""
READY = re.compile(r"action=(?:engine|sessions)_ready url=(http://[\d.]+:\d+)")
Settings = dict[str, Any]


class World:
    name: ClassVar[str]
    settings: ClassVar[Settings]
    progress: ClassVar[tuple[int, int]]
    """Rollouts between two faults: least and most."""
    concurrency: ClassVar[int]
    """of a rollout worker"""
    roles: ClassVar[tuple[str, ...]] = ("orchestrator", "rollouts", "compute", "redis")
    """Kinds of processes: each has a link to Redis and faults of its own."""

    def __init__(self, directory: Path, chance: random.Random, seed: int) -> None:
        """`seed` is that of the run: schedules with different ones draw different lengths and rewards."""
        self.random = chance
        self.seed = seed
        self.directory = directory
        self.disk = directory / "disk"
        self.mounted = _mounted(self.disk)
        self.faults = {role: Faults(directory / f"{role}.faults") for role in self.roles}
        with self.redis_variables():
            self.cluster = Cluster(directory)
        self.cluster.store = self.disk / "store"
        self.links = Links()
        self.link = {role: self.links.to(self.cluster.redis_server.port) for role in self.roles}
        self.wedge = directory / "wedge"
        self.changed: Settings = {}
        self.steps = STEPS
        self.played: list[str] = []
        self.unseen: list[str] = []
        """faults without a visible effect"""
        self.exits: list[str] = []
        """last words of orchestrators that ended with an error"""

    def begin(self) -> None:
        """Start every process."""
        self.configure()
        self.workers = [self.rollout_worker(), self.rollout_worker()]
        self.compute = self.compute_worker()
        self.run = self.orchestrator()

    def configure(self, **changed: Any) -> None:
        """Write the configuration, with what was changed before."""
        self.changed |= changed
        settings = self.settings | {"steps": self.steps, "seed": self.seed, "ledger_dir": str(self.disk / "ledger")}
        settings |= self.own_settings()
        for table, values in self.changed.items():
            settings[table] = settings.get(table, {}) | values
        self.cluster.configure(**settings)

    def own_settings(self) -> Settings:
        return {}

    @contextmanager
    def redis_variables(self) -> Iterator[None]:
        """Its server inherits the environment of this process."""
        os.environ["FAULT_CONTROL"] = self.faults["redis"].variables["FAULT_CONTROL"]
        try:
            yield
        finally:
            del os.environ["FAULT_CONTROL"]

    @property
    def group_size(self) -> int:
        return self.settings["rollouts"]["group_size"]

    # processes

    def variables(self, role: str) -> dict[str, str]:
        redis = f"redis://127.0.0.1:{self.link[role].port}/0" if role in self.link else ""
        return {
            **self.faults[role].variables,
            "HEADPOND_REDIS_URL": redis,
            "HEADPOND_STORE": self.cluster.store.as_uri(),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        }

    def rollout_worker(self, **variables: str) -> Process:
        return self.cluster.rollout_worker(self.concurrency, **self.variables("rollouts") | variables)

    def compute_worker(self, **variables: str) -> Process:
        return self.cluster.compute_worker(**self.variables("compute") | variables)

    def orchestrator(self) -> Process:
        return self.cluster.orchestrator(**self.variables("orchestrator"))

    def restart_workers(self) -> None:
        """As an operator does after a changed setting."""
        old = [*self.workers, self.compute]
        self.workers = [self.rollout_worker(), self.rollout_worker()]
        self.compute = self.compute_worker()
        for process in old:
            process.signal(signal.SIGTERM)
        for process in old:
            process.wait()

    # watching

    def watch(self) -> None:
        """Processes that no fault has ended run. An orchestrator that ended with an error is resumed, as an operator
        would: a bounded number of times, and never after a traceback."""
        for process in self.permanent():
            assert process.exit_code is None, f"{process.name} has ended:\n{process.text[-4000:]}"
        if self.run.exit_code is None or (self.run.exit_code == 0 and self.steps < STEPS):
            return
        assert "Traceback" not in self.run.text, self.run.text[-6000:]
        self.exits.append(self.run.text.strip()[-600:])
        assert len(self.exits) <= RESTARTS, f"orchestrators ended again and again:\n{self.exits}"
        self.run = self.orchestrator()

    def permanent(self) -> list[Process]:
        return [*self.workers, self.compute]

    def wait(self, predicate: Callable[[], object], what: str) -> None:
        give_up_at = time.monotonic() + HANG_S
        while not predicate():
            self.watch()
            assert time.monotonic() < give_up_at, f"waited {HANG_S:g} s for: {what}, after {self.played}"
            time.sleep(POLL_S)

    def until(self, is_visible: Callable[[], object], most_s: float = 6.0) -> None:
        """Wait until the fault has an effect. How long it lasts without one decides nothing."""
        give_up_at = time.monotonic() + most_s
        while not is_visible():
            if time.monotonic() > give_up_at:
                self.unseen.append(self.played[-1])
                return
            time.sleep(POLL_S)

    def status(self) -> Status:
        return self.cluster.status()

    def generated(self) -> int:
        rollouts = self.status().rollouts
        return rollouts.get("planned", 0) - rollouts.get("in_flight", 0)

    def step(self) -> int:
        return self.status().step

    def progressed(self) -> None:
        enough = self.generated() + self.random.randrange(*self.progress)
        self.wait(lambda: self.generated() > enough, "progress")

    def waits_for(self, text: str) -> bool:
        return any(text in cause for cause in self.status().waiting_for)

    def lost(self) -> int:
        return self.cluster.events("lost")

    # the end

    def finish(self) -> None:
        """Drain the run, and resume it with as many steps as it has and two more. Then stop what is left."""
        self.drain()
        self.steps = self.step() + LAST_STEPS
        self.configure()
        self.run = self.orchestrator()
        self.wait(self.ended, "the end of the run")
        assert "Traceback" not in self.run.text, self.run.text[-6000:]
        self.stop()

    def drain(self) -> None:
        """It may have ended with an error before."""
        self.watch()
        self.run.signal(signal.SIGINT)
        assert self.run.wait() == 0, self.run.text[-6000:]

    def ended(self) -> bool:
        return self.run.exit_code == 0

    def stop(self) -> None:
        """Every process ends when it is asked to."""
        for process in self.permanent():
            process.signal(signal.SIGTERM)
        for process in self.permanent():
            process.wait()

    def close(self) -> None:
        self.cluster.stop()
        self.links.close()


class NoopWorld(World):
    name = "noop"
    progress = (8, 40)
    concurrency = 12
    settings: ClassVar[Settings] = {
        "batch": {"size": 6, "data_ranks": 2},
        "rollouts": {"group_size": 8, "max_in_flight": 160},
        "recovery": {"lease_s": 2.0, "max_losses": 200, "max_failures": 40, "max_formations": 20, "drain_s": 5.0},
        "noop": {"rollout_s": 0.8, "failure_rate": 0.02, "policy_error_rate": 0.05, "drop_rate": 0.02},
    }

    @cached_property
    def engine_down(self) -> Path:
        return self.directory / "engine-down"

    def rollout_worker(self, **variables: str) -> Process:
        paths = {"ENGINE_DOWN_WHILE": self.engine_down, "WEDGE_WHILE": self.wedge}
        hooks = {f"NOOP_{name}": str(path) for name, path in paths.items()}
        return super().rollout_worker(**hooks | variables)


class EngineWorld(World):
    name = "engine"
    progress = (4, 16)
    concurrency = 6
    environment: ClassVar[str] = "Speaking"
    roles = ("orchestrator", "rollouts", "compute", "redis", "engine", "trainer")
    settings: ClassVar[Settings] = {
        "batch": {"size": 4, "seq_len": 4096},
        "rollouts": {"group_size": 4, "max_in_flight": 48},
        "policy": {"seeded": True},
        "recovery": {"lease_s": 2.0, "max_losses": 200, "max_failures": 40, "max_formations": 20, "drain_s": 5.0},
        "trainer": {"max_steps_ahead": 2, "keep_steps": 1},
        # Rewards and lengths are compared with what was planned, so that no filter may choose.
        "filters.zero_variance": {"mode": "off"},
    }

    def begin(self) -> None:
        self.engine_port = 0
        self.engine = self.start_engine()
        self.engine_port = int(self.address(self.engine).rpartition(":")[2])
        self.trainers: list[Process] = []
        super().begin()
        wait_until((self.cluster.run_dir / "run.json").exists, what="the run's directory")
        self.start_trainer(-1)

    def own_settings(self) -> Settings:
        # In order: what was planned is known by the ordinals of the groups.
        use = {"use": f"support.chaos.environments:{self.environment}", "order": "in_order"}
        options = {"wedge_while": str(self.wedge), "seed": self.seed}
        environment = {"environments.speaking": use, "environments.speaking.options": options}
        return environment | {"engine": self._engine_settings()}

    def _engine_settings(self) -> Settings:
        """The trainer of the tests loads no weights: the versions are those that it announces."""
        urls, waits = [self.address(self.engine)], {"unreachable_s": 0.5, "silence_s": 5.0}
        return {"urls": urls, "routed_experts": True, "versions": "announced", **waits}

    def address(self, process: Process) -> str:
        """Waits until it listens."""
        match = wait_until(lambda: READY.search(process.text) or process.exit_code is not None)
        assert isinstance(match, re.Match), f"{process.name} has ended:\n{process.text}"
        return match[1]

    def start_engine(self) -> Process:
        arguments = ["--layers", "4", "--length", "constant:400", "--latency", "constant:0.5"]
        command = [str(BIN / "headpond"), "engine", "--port", str(self.engine_port), *arguments]
        return self.cluster.start("engine", *command, **self.faults["engine"].variables)

    def start_trainer(self, resume_step: int) -> Process:
        script = ROOT / "tests" / "support" / "trainer.py"
        numbers = map(str, (0, 1, resume_step, -1, 2))
        command = [sys.executable, str(script), str(self.cluster.run_dir), *numbers]
        self.trainers.append(self.cluster.start("trainer", *command, **self.faults["trainer"].variables))
        return self.trainers[-1]

    @property
    def trainer(self) -> Process:
        return self.trainers[-1]

    def permanent(self) -> list[Process]:
        return [*super().permanent(), self.engine]

    def watch(self) -> None:
        super().watch()
        code = self.trainer.exit_code
        assert code is None or (code == 0 and self.steps < STEPS), f"the trainer ended: {self.trainer.text[-4000:]}"

    def ended(self) -> bool:
        return super().ended() and self.trainer.exit_code == 0


class AgentWorld(EngineWorld):
    name = "agents"
    environment = "Calling"
    roles = (*EngineWorld.roles, "sessions")

    def begin(self) -> None:
        self.sessions_port = 0
        self.sessions: Process | None = None
        super().begin()

    def own_settings(self) -> Settings:
        if self.sessions is None:
            self.sessions = self.start_sessions()
            self.sessions_port = int(self.address(self.sessions).rpartition(":")[2])
        return super().own_settings() | {"sessions": {"urls": [self.address(self.sessions)]}}

    def start_sessions(self) -> Process:
        """With a configuration of its own: the run's has its address."""
        config = self.directory / "sessions.toml"
        sessions = {"port": self.sessions_port, "instance_id": "cd" * 16, "idle_s": IDLE_S}
        config.write_text(toml({"engine": self._engine_settings(), "sessions": sessions}))
        return self.cluster.start(
            "sessions", str(BIN / "headpond"), "sessions", str(config), **self.variables("sessions")
        )

    def permanent(self) -> list[Process]:
        return [*super().permanent(), *([self.sessions] if self.sessions else [])]

    def stop(self) -> None:
        """Sessions that could not be deleted, because a process was away, expire."""
        self.wait(lambda: not self._session_files(), "the end of every session")
        super().stop()

    def _session_files(self) -> list[str]:
        """By `os.walk`, which passes over directories that go away meanwhile."""
        names = (name for _, _, files in os.walk(self.cluster.store / "sessions") for name in files)
        return [name for name in names if name != ".lock"]


WORLDS: dict[str, type[World]] = {world.name: world for world in (NoopWorld, EngineWorld, AgentWorld)}


def _mounted(directory: Path) -> bool:
    """Whether the directory is a small disk of its own: this process is in a mount namespace that ends with it."""
    directory.mkdir()
    if os.environ.get("CHAOS_NAMESPACE") != "1":
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "headpond", str(directory)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
