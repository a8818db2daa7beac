"""A whole pipe with real bytes in it: an engine, workers, real stages, an orchestrator a run, a trainer behind it.

Redis and every process are its own, so that several pipes that differ in their bytes take turns on one machine.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.canary import INTERVAL_S
from bench.cluster import Cluster, Run, cluster
from bench.processes import Process
from orchestrator.ledger.audit import audit
from penstock.errors import RunError

RUN_S = 300.0
GROUP_SIZE = 8
TOPK = 8
COMPUTE_PROCESSES = 2


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a run of the pipe carries: in every turn the user says `said` tokens and the policy answers `answered`."""

    steps: int
    step_rollouts: int
    turns: int
    said: int
    answered: int
    layers: int
    """of routed experts, TOPK bytes a token each; 0: none"""

    @property
    def settings(self) -> str:
        return f"""
steps = {self.steps}
policy.max_seq_len = {1 << 20}
rollouts.group_size = {GROUP_SIZE}
rollouts.max_in_flight = {self.step_rollouts}
batch.size = {self.step_rollouts // GROUP_SIZE}
filters.zero_variance.mode = "monitor"
environments.talk.use = "bench.talk:Talk"
environments.talk.options = {{ turns = {self.turns}, said = {self.said} }}
engine.routed_experts = {json.dumps(self.layers > 0)}
"""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    load: Load
    cluster: Cluster
    rollout_worker: Process

    def received_bytes(self) -> int:
        """From the engine, and little else, since the worker started."""
        counters = Path(f"/proc/{self.rollout_worker.pid}/io").read_text()
        return int(counters.partition("rchar: ")[2].split()[0])

    @contextmanager
    def running(self) -> Iterator[Run]:
        """A run that has begun to plan, with its trainer; at the end it must have delivered all, and add up."""
        run = self.cluster.orchestrator(lag__interval_s=INTERVAL_S)
        trainer = self.cluster.start("trainer", "python", "-m", "bench.trainer", str(run.directory), self.cluster.store)
        yield run
        for process in (run.process, trainer):
            process.wait_until(lambda process=process: process.ended, what="the run's end", timeout_s=RUN_S)
        found = audit(run.directory)
        if not found["balanced"] or found["delivered"] != self.load.steps * self.load.step_rollouts:
            raise RunError(f"the run came to a wrong end: {found}\n{run.process.last_words}\n{trainer.last_words}")
        self.cluster.kill(run.process)
        self.cluster.kill(trainer)

    def steps(self, run: Run, meanwhile: Callable[[], object]) -> Iterator[dict[str, Any]]:
        """The line of each step in metrics.jsonl as soon as it is there."""
        path = run.directory / "metrics.jsonl"

        def lines() -> list[str]:
            meanwhile()
            return path.read_text().splitlines() if path.exists() else []

        for step in range(self.load.steps):
            run.process.wait_until(lambda step=step: len(lines()) > step, what=f"step {step}", timeout_s=RUN_S)
            yield json.loads(lines()[step])


@contextmanager
def pipeline(load: Load) -> Iterator[Pipeline]:
    with cluster(trainer__max_steps_ahead=1) as own:
        routes = ["--layers", str(load.layers), "--topk", str(TOPK)]
        length = ["--length", f"constant:{load.answered}", "--max-model-len", str(1 << 20)]
        url = own.engine(*routes, *length)
        own.configure(f'{load.settings}engine.urls = ["{url}"]\n')
        rollout_worker = own.rollout_worker(concurrency=load.step_rollouts)
        own.compute_worker(concurrency=COMPUTE_PROCESSES)
        own.wait_ready()
        yield Pipeline(load=load, cluster=own, rollout_worker=rollout_worker)
