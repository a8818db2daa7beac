"""A whole Penstock on this machine: an embedded Redis and real processes, started with the commands that users type."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from bench.cpu import cpu_s
from bench.processes import Process
from penstock.runtime.embedded_redis import EmbeddedRedis
from tasks.celery_app import CONTENT_TYPE

START_S = 60.0  # a worker imports for 2 s; on a machine that others use, for longer
PING_S = 0.5
ENGINE_READY = re.compile(r"action=engine_ready url=(http://\S+)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """An orchestrator and the directory of its run."""

    process: Process
    directory: Path

    def status(self) -> dict[str, Any]:
        """As `penstock status` shows it; empty before the first."""
        path = self.directory / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}


class Cluster:
    """Settings are those of RunConfig, as the variables PENSTOCK_* have them: `rollouts__group_size=8`."""

    def __init__(self, directory: Path, server: EmbeddedRedis, settings: Mapping[str, object]) -> None:
        self.directory = directory
        self.redis_url = server.url
        self.redis = redis.Redis.from_url(server.url)
        self._server = server
        self.store = f"file://{directory / 'store'}"
        # Unless it says otherwise, a benchmark waits for no trainer.
        own = {"redis_url": server.url, "store": self.store, "trainer__max_steps_ahead": "unlimited"}
        self._settings: dict[str, object] = {**own, **settings}
        self._processes: list[tuple[str, Process]] = []
        self._starting: list[tuple[Process, str, str]] = []
        self._started = 0

    def configure(self, text: str) -> None:
        """A configuration file for the processes that are started from now on; settings go before it."""
        path = self.directory / "run.toml"
        path.write_text(text)
        self._settings["config"] = path

    def start(self, kind: str, *command: str, **settings: object) -> Process:
        self._started += 1
        variables = {f"PENSTOCK_{name.upper()}": str(value) for name, value in {**self._settings, **settings}.items()}
        process = Process(f"{kind}-{self._started}", list(command), directory=self.directory, variables=variables)
        self._processes.append((kind, process))
        return process

    def kill(self, process: Process) -> None:
        process.kill()
        self._processes = [(kind, other) for kind, other in self._processes if other is not process]

    def engine(self, *options: str) -> str:
        """The URL of an engine that listens."""
        process = self.start("engine", "penstock", "engine", "--port", "0", *options)
        found = process.wait_until(lambda: ENGINE_READY.search(process.output), what="it listens", timeout_s=START_S)
        assert found is not None
        return found[1]

    def rollout_worker(self, *, concurrency: int, **settings: object) -> Process:
        options = ["-Q", "rollouts", "-c", str(concurrency)]
        return self.worker("rollout worker", "workers.rollouts", options, **settings)

    def compute_worker(self, *, concurrency: int) -> Process:
        options = ["-Q", "filtering,advantages,encoding", "-c", str(concurrency)]
        return self.worker("compute worker", "workers.compute", options)

    def worker(self, kind: str, app: str, options: list[str], broker_url: str = "", /, **settings: object) -> Process:
        """A Celery worker that has begun to start: see `wait_ready`."""
        node = f"bench{self._started}@localhost"
        broker = ["-b", broker_url] if broker_url else []
        process = self.start(kind, "celery", "-A", app, *broker, "worker", "-n", node, *options, **settings)
        self._starting.append((process, node, broker_url or self.redis_url))
        return process

    def wait_ready(self) -> None:
        """Until every worker answers; started together, they take little longer than one."""
        for process, node, broker_url in self._starting:
            asking = Celery(broker=broker_url, accept_content=["json", CONTENT_TYPE]).control
            process.wait_until(
                lambda asking=asking, node=node: asking.ping(destination=[node], timeout=PING_S),
                what="it answered",
                timeout_s=START_S,
            )
        self._starting.clear()

    def orchestrator(self, **settings: object) -> Run:
        """An orchestrator on a run directory of its own, when it begins to plan: its start-up is over.

        The last run must have ended: a store holds one run, so that run's files go.
        """
        shutil.rmtree(self.directory / "store", ignore_errors=True)
        directory = self.directory / f"run{self._started}"
        process = self.start("orchestrator", "penstock", "run", run_dir=directory, **settings)
        run = Run(process=process, directory=directory)
        process.wait_until(run.status, what="the orchestrator begins", timeout_s=START_S)
        return run

    def stop(self) -> None:
        for _, process in self._processes:
            process.kill()
        self.redis.close()

    def cpu_s(self) -> dict[str, float]:
        """So far, by kind of process."""
        spent = {"redis": cpu_s(self._server.pid)}
        for kind, process in self._processes:
            spent[kind] = spent.get(kind, 0.0) + cpu_s(process.pid)
        return spent


@contextmanager
def cluster(**settings: object) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory,
        EmbeddedRedis(Path(directory, "redis")) as server,
    ):
        started = Cluster(Path(directory), server, settings)
        try:
            yield started
        finally:
            started.stop()
