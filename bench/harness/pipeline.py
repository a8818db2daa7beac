"""A complete pipeline with real bytes: engine, workers, stages, one orchestrator per run, and a trainer.

Each has its own Redis and processes, so that pipelines with different loads can alternate on one machine.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.harness.canary import INTERVAL_S
from bench.harness.cluster import Cluster, Run, start_cluster
from bench.harness.procfs import read_bytes
from headpond.errors import RunError
from headpond.inspection.audit import audit
from headpond.processes.child_process import ChildProcess

RUN_S = 300.0
GROUP_SIZE = 8
TOPK = 8
COMPUTE_PROCESSES = 2


@dataclass(frozen=True, kw_only=True)
class Load:
    """Steps, rollouts and tokens of one run."""

    steps: int
    step_rollouts: int
    turns: int
    user_tokens: int
    """per turn"""
    completion_tokens: int
    """per turn"""
    layers: int
    """of routed experts, TOPK bytes per token and layer; 0: none"""

    @property
    def settings(self) -> str:
        return f"""
steps = {self.steps}
policy.max_seq_len = {1 << 20}
rollouts.group_size = {GROUP_SIZE}
rollouts.max_in_flight = {self.step_rollouts}
batch.size = {self.step_rollouts // GROUP_SIZE}
filters.zero_variance.mode = "monitor"
environments.conversation.use = "bench.harness.environments:Conversation"
environments.conversation.options = {{ turns = {self.turns}, user_tokens = {self.user_tokens} }}
engine.routed_experts = {json.dumps(self.layers > 0)}
"""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    load: Load
    cluster: Cluster
    rollout_worker: ChildProcess

    def received_bytes(self) -> int:
        """Read by the rollout worker since it started, almost all of it from the engine."""
        return read_bytes(self.rollout_worker.pid)

    @contextmanager
    def running(self) -> Iterator[Run]:
        """A run that has begun to plan, and its trainer. Checks at exit that it delivered every rollout."""
        run = self.cluster.orchestrator(lag__interval_s=INTERVAL_S)
        command = ["python", "-m", "bench.harness.trainer", str(run.directory), self.cluster.store]
        trainer = self.cluster.start("trainer", *command)
        yield run
        for process in (run.process, trainer):
            process.wait_until(lambda process=process: process.ended, what="the run has ended", timeout_s=RUN_S)
        result = audit(run.directory)
        if not result["balanced"] or result["delivered"] != self.load.steps * self.load.step_rollouts:
            raise RunError(f"the run failed: {result}\n{run.process.output_tail}\n{trainer.output_tail}")
        self.cluster.kill(run.process)
        self.cluster.kill(trainer)

    def steps(self, run: Run, meanwhile: Callable[[], object]) -> Iterator[dict[str, Any]]:
        """Each step's line of metrics.jsonl as soon as it is written."""
        path = run.directory / "metrics.jsonl"

        def lines() -> list[str]:
            meanwhile()
            return path.read_text().splitlines() if path.exists() else []

        for step in range(self.load.steps):
            run.process.wait_until(
                lambda step=step: len(lines()) > step, what=f"step {step} is delivered", timeout_s=RUN_S
            )
            yield json.loads(lines()[step])


@contextmanager
def start_pipeline(load: Load) -> Iterator[Pipeline]:
    with start_cluster(trainer__max_steps_ahead=1) as cluster:
        experts = ["--layers", str(load.layers), "--topk", str(TOPK)]
        length = ["--length", f"constant:{load.completion_tokens}", "--max-model-len", str(1 << 20)]
        url = cluster.engine(*experts, *length)
        cluster.configure(f'{load.settings}engine.urls = ["{url}"]\n')
        rollout_worker = cluster.rollout_worker(concurrency=load.step_rollouts)
        cluster.compute_worker(concurrency=COMPUTE_PROCESSES)
        cluster.wait_ready()
        yield Pipeline(load=load, cluster=cluster, rollout_worker=rollout_worker)
