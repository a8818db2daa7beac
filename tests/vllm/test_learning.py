"""A Hugging Face model learns through real vLLM and examples/grpo_torch.py, with kills on the way."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster, Process, cluster_in
from support.documents import ROOT
from support.processes import kill_tree
from support.vllm_server import Release, VllmServer
from support.waiting import wait_until

logger = logging.getLogger("headpond.tests")
LEARNING_RATE = "1e-3"
SHORT, LONG = 20, 60
LEARNED = 0.9
ALIGNED = 1e-3
"""between logprobs of vLLM and of the trainer, before the first update"""
WAIT_S = 900.0
"""for a few steps on a busy machine"""


class Learning:
    """A run, its workers and its trainer on two data ranks."""

    def __init__(self, cluster: Cluster, release: Release, model: Path) -> None:
        self.cluster, self.output, self._model = cluster, cluster.directory / "training", model
        python = os.environ.get("HEADPOND_TORCH_PYTHON", str(release.python))  # vLLM's environment has torch
        self._torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        self.worker, self.compute = cluster.rollout_worker(), cluster.compute_worker()
        self.orchestrator = cluster.orchestrator()
        self.trainer = self.start_trainer()

    def start_trainer(self) -> Process:
        script = [str(ROOT / "examples" / "grpo_torch.py"), str(self.cluster.run_dir), str(self._model)]
        command = [*self._torchrun, *script, str(self.output), "--lr", LEARNING_RATE, "--checkpoint-every", "3"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADPOND_", "PYTHON"))}
        variables = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return Process("trainer", command, variables, self.cluster.directory)

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """What the trainer reports; a step that was trained again after a kill counts once."""
        path = self.output / "training.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {line["step"]: line for line in map(json.loads, lines)}

    def wait_step(self, step: int) -> None:
        def reached() -> bool:
            for process in (self.trainer, self.orchestrator):
                assert process.exit_code is None, process.text[-3000:]
            return max(self.steps, default=-1) >= step

        wait_until(reached, timeout_s=WAIT_S, what=f"step {step}")

    def finish(self) -> dict[int, float]:
        for process in (self.orchestrator, self.trainer):
            assert process.wait(WAIT_S) == 0, process.text[-3000:]
        audit = self.cluster.audit()
        assert audit["balanced"], audit["problems"]
        steps = self.steps
        assert sorted(steps) == list(range(len(steps)))
        assert steps[0]["max"] < ALIGNED, "the trainer computes what the engine sampled from"
        return {step: steps[step]["reward"] for step in sorted(steps)}


Begin = Callable[[VllmServer, Path, int], Learning]


@pytest.fixture
def learning(release: Release, tmp_path: Path) -> Iterator[Begin]:
    opened: list[Any] = []
    begun: list[Learning] = []

    def begin(server: VllmServer, model: Path, steps: int) -> Learning:
        routed = release.has_routes and model.parent.name == "moe"
        engine = {"urls": [server.url], "routed_experts": routed, "weight_update": "headpond", "unreachable_s": 2.0}
        settings: dict[str, Any] = {
            "steps": steps,
            "engine": engine,
            "policy.sampling": {"max_tokens": 16},
            "policy.sampling.more.chat_template_kwargs": {"enable_thinking": False},
            "rollouts": {"group_size": 8, "max_in_flight": 64},
            "batch": {"size": 6, "data_ranks": 2, "seq_len": 2048},
            "trainer": {"max_steps_ahead": 0},
            "advantages": {"estimator": "grpo"},
            "filters.zero_variance": {"mode": "monitor"},
            "filters.overlong": {"mode": "monitor"},  # nearly every completion has 16 tokens
            "environments.fifths": {"use": "tests.support.vllm_environments:Fifths"},
        }
        context = cluster_in(tmp_path, **settings)
        opened.append(context)
        begun.append(Learning(context.__enter__(), release, model))
        return begun[-1]

    yield begin
    for each in begun:
        kill_tree(each.trainer.pid)
    for context in opened:
        context.__exit__(None, None, None)


def test_the_reward_rises(learning: Begin, server: VllmServer, weights: dict[int, Path]) -> None:
    running = learning(server, weights[0], SHORT)
    server.weights = None  # those of the trainer, from now on
    curve = running.finish()
    first, last = (sum(curve[step] for step in steps) / 3 for steps in (range(3), range(SHORT - 3, SHORT)))
    assert last > first + 0.2, curve


@pytest.mark.slow
def test_the_reward_rises_to_0_9_with_kills_of_trainer_worker_and_engine(
    learning: Begin, start_server: Callable[..., VllmServer], models: Path
) -> None:
    server = start_server("dense/0")
    running = learning(server, models / "dense" / "0", LONG)
    running.wait_step(8)
    kill_tree(running.trainer.pid)
    running.trainer = running.start_trainer()
    running.wait_step(14)
    running.worker.kill()
    running.worker = running.cluster.rollout_worker()
    running.wait_step(20)
    server.restart()
    server.wait_ready()
    curve = running.finish()
    logger.warning("reward by step: %s", " ".join(f"{reward:.2f}" for reward in curve.values()))
    assert len(curve) == LONG
    assert curve[0] < 0.4, curve
    assert max(curve[step] for step in range(LONG - 5, LONG)) >= LEARNED, curve
