"""Rewards by turn and by agent, from an environment through estimator and encoding to each token's advantage."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cluster import Cluster, cluster_in
from support.engine_process import EngineProcess

from headpond import BatchReader
from headpond.batches import MicroBatch
from headpond.commands.redone import Redo

ENVIRONMENT = """
from headpond import Score

class Duel:
    examples = range(8)

    async def rollout(self, example, policy):
        messages = [{"role": "user", "content": f"game {example}"}]
        lengths = []
        for turn in range(3):
            completion = await policy.chat(messages, agent="white" if turn % 2 == 0 else "black")
            messages += [completion.message, {"role": "user", "content": "your move"}]
            lengths.append(len(completion.token_ids))
        white, black = (lengths[0] + lengths[2]) / 100, lengths[1] / 100
        agents = {"white": white, "black": black}
        return Score(reward=white, turn_rewards=[length / 10 for length in lengths], agent_rewards=agents)
"""
DECLARED = """
[environments.duel]
use = "duel:Duel"
"""


def run(tmp_path: Path, estimator: str) -> tuple[dict[str, dict[str, Any]], list[tuple[str, list[float]]]]:
    """The results in the ledger, and of each rollout in the order of steps and ids: the advantages of its turns."""
    engine = EngineProcess(tmp_path)
    try:
        host, port = engine.address
        settings = {
            "steps": 2,
            "engine": {"urls": [f"http://{host}:{port}"]},
            "rollouts": {"group_size": 2},
            "batch": {"size": 2, "seq_len": 2048},
            "advantages": {"estimator": estimator},
            "trainer": {"max_steps_ahead": "unlimited"},
        }
        with cluster_in(tmp_path, **settings) as cluster:
            (cluster.directory / "duel.py").write_text(ENVIRONMENT)
            cluster.add_environments(DECLARED)
            cluster.rollout_worker(PYTHONPATH=f"{Path(__file__).parents[2]}:{cluster.directory}")
            cluster.compute_worker()
            orchestrator = cluster.orchestrator()
            assert orchestrator.wait(90) == 0, orchestrator.text[-3000:]
            result = cluster.audit()
            assert result["balanced"], result["problems"]
            assert_redone(cluster.run_dir, estimator)
            return ledger_results(cluster), list(delivered(cluster))
    finally:
        engine.end()


def assert_redone(run_dir: Path, estimator: str) -> None:
    """Unchanged settings give the same bytes; one advantage for all turns of a rollout gives others."""
    other = Redo(run_dir, ["advantages.estimator=grpo"])
    for step in (0, 1):
        redone = Redo(run_dir).step(step)
        assert redone.same_bytes, estimator
        assert [one for one in redone.rollouts if one.why] == []
        changed = other.step(step)
        assert not changed.same_bytes
        assert {one.why for one in changed.rollouts} == {"advantages.estimator = grpo"}


def ledger_results(cluster: Cluster) -> dict[str, dict[str, Any]]:
    rows = cluster.ledger("SELECT id, result FROM kept_results WHERE result IS NOT NULL")
    return {rollout: json.loads(result) for rollout, result in rows}


def delivered(cluster: Cluster) -> list[tuple[str, list[float]]]:
    reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, store=f"file://{cluster.store}", timeout_s=0)
    found: list[tuple[str, list[float]]] = []
    for batch in reader:
        step: dict[str, list[float]] = {}
        for mb in batch.micro_batches():
            for sample, index in enumerate(mb.samples.rollout_index.tolist()):
                step[batch.plan.rollouts[index].rollout] = of_turns(mb, sample)
        found += sorted(step.items())
    return found


def of_turns(mb: MicroBatch, sample: int) -> list[float]:
    """One advantage for each run of tokens that the policy sampled; it is the same within the run."""
    span = slice(*mb.cu_seqlens[sample : sample + 2].tolist())
    sampled = np.flatnonzero(mb.versions[span] >= 0)
    runs = np.split(mb.advantages[span][sampled], np.flatnonzero(np.diff(sampled) > 1) + 1)
    assert all(len(set(run.tolist())) == 1 for run in runs)
    return [float(run[0]) for run in runs]


def test_agents_have_the_advantages_of_rae_in_every_token(tmp_path: Path) -> None:
    results, rollouts = run(tmp_path, "rae")
    assert len(rollouts) == 8
    baselines = {"white": 0.0, "black": 0.0}
    for rollout, advantages in rollouts:
        rewards = results[rollout]["agent_rewards"]
        expected = {agent: rewards[agent] - baselines[agent] for agent in baselines}
        assert advantages == pytest.approx([expected["white"], expected["black"], expected["white"]], abs=1e-6)
        baselines = {agent: 0.95 * each + 0.05 * rewards[agent] for agent, each in baselines.items()}


@pytest.mark.slow
def test_turns_have_the_advantages_of_process_supervision_in_every_token(tmp_path: Path) -> None:
    _, rollouts = run(tmp_path, "grpo_process")
    groups: dict[str, list[list[float]]] = {}
    for rollout, advantages in rollouts:
        groups.setdefault(rollout.rpartition("-")[0], []).append(advantages)
    assert len(groups) == 4
    for members in groups.values():
        # The normalised rewards are differences of the sums; over the group they have mean 0 and deviation 1.
        normal = np.concatenate([np.append(-np.diff(each), each[-1]) for each in members])
        assert normal.size == 6
        assert normal.mean() == pytest.approx(0, abs=1e-5)
        assert normal.std(ddof=1) == pytest.approx(1, abs=1e-3)
