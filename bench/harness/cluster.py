"""A complete Headpond on this machine: an embedded Redis and real processes, started with the commands of users."""

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from celery import Celery

from bench.harness.procfs import cpu_s
from headpond.inspection.run_state import last_status
from headpond.processes.child_process import ChildProcess
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.records.status import Status
from headpond.tasks.celery_app import CONTENT_TYPE

START_S = 60.0  # imports of a worker take 2 s, longer on a busy machine
PING_S = 0.5
NOOPS: dict[str, object] = {"environments__noop__use": "noop", "engine__check": "false"}
"""Settings of a run of no-op stages."""
ENGINE_READY = re.compile(r"action=engine_ready url=(http://\S+)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """An orchestrator and the directory of its run."""

    process: ChildProcess
    directory: Path

    def status(self) -> Status:
        """Return the orchestrator's last status; `at` is None before the first."""
        return last_status(self.directory)


class Cluster:
    """Settings are keys of RunConfig as in HEADPOND_* variables: `rollouts__group_size=8`. Those of no-op stages are as
    in NOOP_* variables: `noop_rollout_s=1`."""

    def __init__(self, directory: Path, server: EmbeddedRedis, settings: Mapping[str, object]) -> None:
        self.directory = directory
        self.redis_url = server.url
        self.redis = redis.Redis.from_url(server.url)
        self._server = server
        self.store = (directory / "store").absolute().as_uri()
        # By default a benchmark does not wait for a trainer. A trainer announces versions and loads no weights.
        defaults: dict[str, object] = {"trainer__max_steps_ahead": "unlimited", "engine__versions": "announced"}
        self._settings = {"redis_url": server.url, "store": self.store, **defaults, **settings}
        self._workers = "bench.harness.noop" if NOOPS.items() <= settings.items() else "headpond.workers"
        self._processes: list[tuple[str, ChildProcess]] = []
        self._starting: list[tuple[ChildProcess, str, str]] = []
        self._started = 0

    def configure(self, text: str) -> None:
        """Write a configuration file for processes started from now on; settings override it."""
        path = self.directory / "run.toml"
        path.write_text(text)
        self._settings["config"] = path

    def start(self, kind: str, *command: str, **settings: object) -> ChildProcess:
        self._started += 1
        variables = {_variable(name): str(value) for name, value in {**self._settings, **settings}.items()}
        process = ChildProcess(f"{kind}-{self._started}", list(command), directory=self.directory, variables=variables)
        self._processes.append((kind, process))
        return process

    def kill(self, process: ChildProcess) -> None:
        process.kill()
        self._processes = [(kind, other) for kind, other in self._processes if other is not process]

    def engine(self, *options: str) -> str:
        """Start an engine. Returns its URL when it listens."""
        process = self.start("engine", "headpond", "engine", "--port", "0", *options)
        match = process.wait_until(
            lambda: ENGINE_READY.search(process.output), what="it is listening", timeout_s=START_S
        )
        assert match is not None
        return match[1]

    def rollout_worker(self, *, concurrency: int, **settings: object) -> ChildProcess:
        options = ["-Q", "rollouts", "-c", str(concurrency)]
        return self.worker("rollout worker", f"{self._workers}.rollouts", options, **settings)

    def compute_worker(self, *, concurrency: int) -> ChildProcess:
        options = ["-Q", "filtering,advantages,encoding", "-c", str(concurrency)]
        return self.worker("compute worker", f"{self._workers}.compute", options)

    def worker(
        self, kind: str, app: str, options: list[str], broker_url: str = "", /, **settings: object
    ) -> ChildProcess:
        """Start a Celery worker without waiting for it: see `wait_ready`."""
        node = f"bench{self._started}@localhost"
        broker = ["-b", broker_url] if broker_url else []
        process = self.start(kind, "celery", "-A", app, *broker, "worker", "-n", node, *options, **settings)
        self._starting.append((process, node, broker_url or self.redis_url))
        return process

    def wait_ready(self) -> None:
        """Wait until every started worker replies to a ping."""
        for process, node, broker_url in self._starting:
            control = Celery(broker=broker_url, accept_content=["json", CONTENT_TYPE]).control
            process.wait_until(
                lambda control=control, node=node: control.ping(destination=[node], timeout=PING_S),
                what="it replied to a ping",
                timeout_s=START_S,
            )
        self._starting.clear()

    def orchestrator(self, *, program: tuple[str, ...] = ("headpond", "run"), **settings: object) -> Run:
        """Start an orchestrator on a new run directory. Returns when it begins to plan.

        The previous run must have ended: its files are deleted, since a store holds one run.
        """
        shutil.rmtree(self.directory / "store", ignore_errors=True)
        directory = self.directory / f"run{self._started}"
        process = self.start("orchestrator", *program, run_dir=directory, **settings)
        run = Run(process=process, directory=directory)
        process.wait_until(lambda: run.status().at, what="it begins to plan", timeout_s=START_S)
        return run

    def stop(self) -> None:
        for _, process in self._processes:
            process.kill()
        self.redis.close()

    def cpu_s(self) -> dict[str, float]:
        """CPU time so far, by kind of process."""
        spent = {"redis": cpu_s(self._server.pid)}
        for kind, process in self._processes:
            spent[kind] = spent.get(kind, 0.0) + cpu_s(process.pid)
        return spent


def _variable(setting: str) -> str:
    return setting.upper() if setting.startswith("noop_") else f"HEADPOND_{setting.upper()}"


@contextmanager
def start_cluster(**settings: object) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="headpond-bench-") as directory,
        EmbeddedRedis(Path(directory, "redis")) as server,
    ):
        started = Cluster(Path(directory), server, settings)
        try:
            yield started
        finally:
            started.stop()
