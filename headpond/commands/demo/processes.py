"""The processes of a demo, started with the commands that users type."""

import json
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headpond.batches import read_trainer
from headpond.commands import curve
from headpond.commands.demo.options import Options, short
from headpond.errors import RunError
from headpond.runtime import lag_summaries
from headpond.runtime.child_process import ChildProcess
from headpond.runtime.embedded_redis import EmbeddedRedis
from headpond.runtime.lag_summaries import LagSummary

logger = logging.getLogger("headpond.demo")

READY = re.compile(r"action=(?:engine|sessions)_ready url=(http://\S+)")
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # the model's products are small: threads would only spin
ENGINE_S = 60.0  # it takes about one second
STOP_S = 5.0  # idle workers take about one second
TICK_S = 0.05
TAIL_LINES = 15


@dataclass(kw_only=True)
class Part:
    process: ChildProcess
    is_ready: Callable[[str], bool]
    """called with the output so far"""
    started_at: float
    ready: bool = False


class DemoProcesses:
    """`start`, then `check` repeatedly until the run is over, `stop`, and always `kill`; all from the main thread."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._redis = EmbeddedRedis(options.run_dir / "redis")
        self._client: redis.Redis | None = None
        self._urls: dict[str, str] = {}
        """environment variables with the addresses of processes that listen"""
        self.parts: dict[str, Part] = {}
        self.stopping = False
        """whether a process may end without an error"""

    def start(self) -> None:
        """Start Redis and the processes that need no address; `check` starts the others when addresses are known."""
        options = self._options
        options.logs.mkdir()
        self._redis.start()
        logger.info("action=ready process=redis url=%s", self._redis.url)
        once = Retry(NoBackoff(), retries=0)
        self._client = redis.Redis.from_url(self._redis.url, retry=once, socket_timeout=1.0)
        seed = ["--seed", str(options.seed)]
        engine = ["headpond", "engine", "--port", "0", "--model", "tiny-moe", *seed]
        self._start("engine", *engine, ready=lambda output: bool(READY.search(output)))
        self._urls["HEADPOND_ENGINE__URLS"] = self._await_engine()  # the orchestrator loads weights into it
        self._start("orchestrator", "headpond", "run", ready=lambda _: bool(self.status()))
        queues = ["-Q", "filtering,advantages,encoding", "-c", "2"]
        self._worker("compute-worker", "headpond.workers.compute", *queues)
        keep = ["--keep-batches"] if options.keep else []
        trainer = ["python", str(options.run_dir / "numpy_trainer.py"), str(options.run_dir), *seed, *keep]
        opened = options.run_dir / "trainer" / "rank_00.json"
        self._start("trainer", *trainer, ready=lambda _: opened.exists())

    def _await_engine(self) -> str:
        """Its URL, once it listens."""
        process = self.parts["engine"].process
        ready = process.wait_until(lambda: READY.search(process.output), what="it listens", timeout_s=ENGINE_S)
        assert ready is not None
        return ready[1]

    def check(self) -> None:
        """Mark processes that are ready and start those that waited for them. Raise if one has ended too early."""
        if not self._redis.running:
            raise RunError(f"Redis ended, so the demo was stopped. Its log is {self._redis.log_path}")
        for name, part in self.parts.items():
            code = part.process.exit_code
            if code is not None and not (self.stopping or (code == 0 and name in ("orchestrator", "trainer"))):
                raise RunError(_early_end(part.process))
            if not part.ready and part.is_ready(part.process.output):
                part.ready = True
                logger.info("action=ready process=%s after_s=%.1f", name, time.monotonic() - part.started_at)
        if "sessions" not in self.parts and self.parts["engine"].ready:
            listening = lambda output: bool(READY.search(output))  # noqa: E731
            self._start("sessions", "headpond", "sessions", "--port", "0", ready=listening)
        if "rollout-worker" not in self.parts and (url := self._url_of("sessions")):
            self._urls["HEADPOND_SESSIONS__URLS"] = url
            self._worker("rollout-worker", "headpond.workers.rollouts", "-Q", "rollouts", "-c", "64")

    def _url_of(self, name: str) -> str | None:
        part = self.parts.get(name)
        match = READY.search(part.process.output) if part and part.ready else None
        return match[1] if match else None

    def ended(self, name: str) -> bool:
        return self.parts[name].process.ended

    def drain(self) -> None:
        """Stop the orchestrator after the jobs that are running; the run can be resumed."""
        self.stopping = True
        self.parts["orchestrator"].process.terminate()

    def stop(self, *, at_once: Callable[[], bool]) -> None:
        """Terminate every process but Redis and wait up to STOP_S; `kill` ends the rest."""
        self.stopping = True
        deadline = time.monotonic() + STOP_S
        processes = [part.process for part in self.parts.values()]
        for process in processes:
            process.terminate()
        while not all(process.ended for process in processes) and time.monotonic() < deadline and not at_once():
            time.sleep(TICK_S)

    def kill(self) -> None:
        """Kill every process with its descendants, and stop Redis."""
        for part in self.parts.values():
            part.process.kill()
        if self._client:
            self._client.close()
        self._redis.stop()

    def status(self) -> dict[str, Any]:
        """The orchestrator's last status; empty before the first."""
        path = self._options.run_dir / "status.json"
        return json.loads(path.read_bytes()) if path.exists() else {}

    def rewards(self) -> list[float]:
        """Mean reward of each delivered step."""
        return [line[curve.MEAN] for line in curve.read_lines(self._options.run_dir / curve.METRICS)]

    def lags(self) -> list[LagSummary]:
        """Lag of every event loop that publishes it, over the last ten seconds."""
        with suppress(redis.RedisError):
            if self._client:
                return lag_summaries.read_summaries(self._client)
        return []

    def trainer_is_behind(self) -> bool:
        """Whether a delivered step is not acknowledged yet. The trainer of a stopped run does not end by itself."""
        return read_trainer(self._options.run_dir).acked + 1 < self.status().get("step", 0)

    def trainer_line(self) -> str:
        """Last line of the trainer's output, or an empty string."""
        lines = self.parts["trainer"].process.output_tail.splitlines() if "trainer" in self.parts else []
        return lines[-1] if lines else ""

    def _worker(self, name: str, app: str, *options: str) -> None:
        command = ["celery", "-A", app, "worker", "-n", f"{name}@demo", "-l", "INFO", *options]
        self._start(name, *command, ready=lambda output: "action=worker_ready" in output)

    def _start(self, name: str, *command: str, ready: Callable[[str], bool]) -> None:
        variables = {"HEADPOND_CONFIG": str(self._options.config), "HEADPOND_REDIS_URL": self._redis.url}
        variables |= self._urls | ONE_THREAD | {"PYTHONPATH": str(self._options.run_dir)}
        process = ChildProcess(name, list(command), directory=self._options.logs, variables=variables)
        self.parts[name] = Part(process=process, is_ready=ready, started_at=time.monotonic())
        logger.info("action=starting process=%s log=%s", name, short(process.log))


def _early_end(process: ChildProcess) -> str:
    lines = process.output_tail.splitlines()[-TAIL_LINES:] or ["(no output)"]
    return "\n  ".join(
        [f"the {process.name} {process.how_it_ended}, so the demo was stopped. The end of {process.log}:", *lines]
    )
