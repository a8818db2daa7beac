"""A complete Headpond of real processes that tests can kill: Redis, workers and orchestrators."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

from bench.harness.noop.stages import NOOP, PREFIX
from headpond.broker import redis_keys
from headpond.inspection.audit import audit
from headpond.inspection.run_json import ledger_path
from headpond.inspection.run_state import last_status
from headpond.ledger.schema import reading
from headpond.processes.embedded_redis import EmbeddedRedis
from headpond.records.status import Status
from support import crash_points
from support.forked_programs import Forked, is_program
from support.waiting import HANG_S, wait_until

BIN = Path(sys.executable).parent
DEFAULTS: dict[str, Any] = {
    "steps": 3,
    "batch": {"size": 4},
    "rollouts": {"group_size": 4},
    "recovery": {"lease_s": 2.0, "drain_s": 20.0},
    "trainer": {"max_steps_ahead": "unlimited"},
}
RUN_DIR_AT_THE_END = ["audited.json", "ledger.sqlite", "lock", "metrics.jsonl", "run.json", "status.json", "trainer"]


class Process:
    """A process in its own process group, with its output in a file."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], directory: Path) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self._popen = _started(command, environment, self.log, directory)
        self.pid = self._popen.pid

    @property
    def exit_code(self) -> int | None:
        return self._popen.poll()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in tasks.read_text().split()]

    def signal(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._popen.wait(HANG_S)

    def wait(self, timeout_s: float = HANG_S) -> int:
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end; the end of its output:\n{self.text[-3000:]}") from None

    def end(self) -> None:
        """Kill the process group."""
        for signum in (signal.SIGCONT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signum)
        self._popen.wait(HANG_S)


def _started(
    command: list[str], environment: dict[str, str], log: Path, directory: Path
) -> "Forked | subprocess.Popen[bytes]":
    if is_program(command) and environment.get("LD_PRELOAD") == os.environ.get("LD_PRELOAD"):
        return Forked(command, environment, log, directory)
    assert crash_points.VARIABLE not in environment, "only a fork kills itself at a crash point"
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=directory, start_new_session=True
        )


class Cluster:
    def __init__(
        self, directory: Path, *, appendonly: bool = True, password: str | None = None, **settings: Any
    ) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self.redis_server = EmbeddedRedis(directory / "redis", appendonly=appendonly, password=password)
        self.redis_server.start()
        self.redis = redis.Redis.from_url(self.redis_server.url)
        self.config = directory / "headpond.toml"
        self.store = directory / "store"
        self.configure(**settings)
        self.processes: list[Process] = []
        self.variables: dict[str, str] = {}
        """of the environment of every process"""
        self.enter: list[str] = []
        """prefix of every command: `SmallDisk.enter`"""

    def configure(self, **settings: Any) -> None:
        """Settings of the run, and `noop`, which has those of no-op stages. They are played by default."""
        values: dict[str, Any] = {"run_dir": str(self.run_dir), "store": self.store.as_uri()} | DEFAULTS
        for key, value in settings.items():
            values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
        self.noop = {f"{PREFIX}{key.upper()}": str(value) for key, value in values.pop("noop", {}).items()}
        if not any(key.startswith("environments.") for key in values):
            values["environments.noop"] = {"use": NOOP}
        self.plays_noops = any(isinstance(value, dict) and value.get("use") == NOOP for value in values.values())
        self.config.write_text(toml(values))

    def add_environments(self, tables: str) -> None:
        """Play the environments of `tables` instead of the no-op environment."""
        settings = self.config.read_text().replace(f'[environments.noop]\nuse = "{NOOP}"\n', "")
        self.config.write_text(settings + tables)
        self.plays_noops = False

    def new_run(self, name: str) -> None:
        """The next orchestrator begins another run, with the same Redis and workers."""
        self.run_dir = self.directory / name
        shutil.rmtree(self.store, ignore_errors=True)

    def start(self, name: str, *command: str, **variables: str) -> Process:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADPOND_")}
        environment |= {
            "HEADPOND_CONFIG": str(self.config),
            "HEADPOND_REDIS_URL": self.redis_server.url,
            "HEADPOND_ENGINE__CHECK": "false",
            "PYTHONPATH": str(Path(__file__).parent.parent.parent),
            **self.noop,
            **self.variables,
            **variables,
        }
        command = (*self.enter, *command)
        process = Process(f"{len(self.processes)}-{name}", list(command), environment, self.directory)
        self.processes.append(process)
        return process

    def rollout_worker(self, concurrency: int = 32, **variables: str) -> Process:
        return self.worker("rollouts", "rollouts", concurrency, **variables)

    def compute_worker(self, concurrency: int = 1, **variables: str) -> Process:
        return self.worker("compute", "filtering,advantages,encoding", concurrency, **variables)

    def worker(self, kind: str, queues: str, concurrency: int, **variables: str) -> Process:
        name = f"{kind}{len(self.processes)}@test"
        options = f"-Q {queues} -l INFO -n {name} -c {concurrency}".split()
        workers = "bench.harness.noop" if self.plays_noops else "headpond.workers"
        command = [str(BIN / "celery"), "-A", f"{workers}.{kind}", "worker", *options]
        return self.start("rollout-worker" if kind == "rollouts" else "compute-worker", *command, **variables)

    def orchestrator(self, **variables: str) -> Process:
        command = [str(BIN / "headpond"), "run", str(self.config), "--run-dir", str(self.run_dir)]
        return self.start("orchestrator", *command, **variables)

    def headpond(self, *arguments: str, **variables: str) -> Process:
        process = self.start("headpond", str(BIN / "headpond"), *arguments, **variables)
        process.wait()
        return process

    def status(self) -> Status:
        return last_status(self.run_dir)

    def ledger(self, query: str) -> list[tuple[Any, ...]]:
        with reading(ledger_path(self.run_dir)) as connection:
            return connection.execute(query).fetchall()

    def events(self, action: str) -> int:
        return self.ledger(f"SELECT count(*) FROM events WHERE action = '{action}'")[0][0]

    def leases(self) -> list[str]:
        return [lease.decode() for lease in self.redis.hkeys(redis_keys.LEASES)]  # type: ignore[union-attr]

    def wait_running(self, at_least: int, of: str = "") -> None:
        """`of` is part of the jobs' names: "-filter", "-advantage"."""
        running = lambda: sum(of in lease for lease in self.leases()) >= at_least  # noqa: E731
        wait_until(running, what=f"{at_least} running executions")

    def wait_waiting_for(self, text: str) -> None:
        """Wait until the status reports `text` among the reasons why the run waits."""
        reported = lambda: any(text in cause for cause in self.status().waiting_for)  # noqa: E731
        wait_until(reported, what=f"the status to report: {text}")

    def audit(self) -> dict[str, Any]:
        return audit(self.run_dir)

    def finish(self, orchestrator: Process) -> dict[str, Any]:
        """Wait for the run to end, then check the audit and that nothing is left over."""
        assert orchestrator.wait() == 0, orchestrator.text[-3000:]
        assert_nothing_left(self)
        result = self.audit()
        assert result["balanced"], result["problems"]
        assert result["in_flight"] == 0
        return result

    def stop(self) -> None:
        for process in self.processes:
            process.end()
        self.redis.close()
        self.redis_server.stop()


def assert_nothing_left_in_redis(cluster: Cluster) -> None:
    ours = {key.decode() for key in cluster.redis.scan_iter("headpond:*")}
    ours -= {redis_keys.LEASES, redis_keys.WORKERS, redis_keys.ENDED}
    # A worker that replies after the end of the run starts its stream again, until it expires.
    late = {key for key in ours if key.startswith("headpond:replies:") and cluster.redis.ttl(key) != -1}
    assert {key for key in ours - late if not key.startswith("headpond:lag:")} == set()
    # A renewal may have written a lease after its end; the next renewal removes it.
    wait_until(lambda: not cluster.leases(), what="every lease to end")


def assert_nothing_left(cluster: Cluster) -> None:
    assert_nothing_left_in_redis(cluster)
    assert sorted(path.name for path in cluster.run_dir.iterdir()) == RUN_DIR_AT_THE_END
    assert {path.name for path in cluster.store.rglob("*") if path.is_file()} == {"manifest.json", "run"}
    assert not list(cluster.run_dir.rglob(".*"))


def assert_keys_have_an_end(client: redis.Redis) -> None:
    """Every key of Headpond has a TTL."""
    endless = [key for key in client.scan_iter("headpond:*") if client.ttl(key) == -1]
    assert not endless, f"keys without a TTL: {endless}"


def toml(values: dict[str, Any]) -> str:
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in tables]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


@contextmanager
def cluster_in(directory: Path, **settings: Any) -> Iterator[Cluster]:
    cluster = Cluster(directory, **settings)
    try:
        yield cluster
        if cluster.redis_server.running:
            assert_keys_have_an_end(cluster.redis)
    finally:
        cluster.stop()
