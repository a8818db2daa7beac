"""Estimators and filters of a package outside the project: through a whole run with kills, and refused at start."""

import json
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cluster import Cluster, cluster_in
from support.pipeline import Pipeline, pipeline_in

PROJECT = Path(__file__).parents[2]
PLAY = """
from headpond import Score

class Duel:
    examples = range(6)

    async def rollout(self, example, policy):
        agent = "white" if example % 2 else "black"
        completion = await policy.chat([{"role": "user", "content": f"move {example}"}], agent=agent)
        parts = {"right": float(len(completion.content) % 2), "brief": (len(completion.content) % 7) / 7}
        return Score(reward=sum(parts.values()) + 10 * (example % 3 == 0), rewards=parts)
"""
RULES = """
import os
from pathlib import Path

import numpy as np
from headpond.advantages import Estimator

with Path(os.environ["OWN_RULES_LOG"]).open("a") as log:
    log.write(f"{os.getpid()}\\n")

def weighted(group):
    values = 2 * group.named_rewards["right"] + group.named_rewards["brief"]
    return values - values.mean()

def less_baseline(batch, state):
    advantages = []
    for value, agents in zip(batch.values.tolist(), batch.agents):
        (agent,) = agents
        advantages.append(value - state["baselines"].get(agent, 0.0))
        state["baselines"][agent] = 0.75 * state["baselines"].get(agent, 0.0) + 0.25 * (value + 1)
    return np.array(advantages), {"baselines": state["baselines"], "steps": state["steps"] + 1}

per_agent = Estimator(
    group=weighted, batch=less_baseline, needs_variance=False, state={"baselines": {}, "steps": 0}
)

def third(rollout):
    sampled = np.flatnonzero(rollout.loss_mask)
    return sampled[-1] if len(sampled) % 3 == 0 else None

def rich(group):
    return group.rewards.min() >= 10
"""
FILTERS = """
[filters.custom.thirds]
use = "own_package.rules:third"
mode = "drop"
[filters.custom_groups.riches]
use = "own_package.rules:rich"
mode = "drop"
"""


def write_package(directory: Path) -> dict[str, str]:
    """A package outside the project; returns the environment variables of processes that use it."""
    package = directory / "elsewhere" / "own_package"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "play": PLAY, "rules": RULES}.items():
        (package / f"{name}.py").write_text(text)
    return {"PYTHONPATH": f"{PROJECT}:{package.parent}", "OWN_RULES_LOG": str(directory / "rules.log")}


def results(cluster: Cluster) -> dict[str, dict[str, Any]]:
    rows = cluster.ledger("SELECT id, result FROM kept_results WHERE result IS NOT NULL")
    return {rollout: json.loads(result) for rollout, result in rows}


def expected_advantages(pipeline: Pipeline) -> Iterator[tuple[int, dict[str, float]]]:
    """Step -> rollout -> advantage, computed again from the rewards in the ledger."""
    played, baselines = results(pipeline.cluster), defaultdict[str, float](float)
    for step, manifest in pipeline.manifests.items():
        expected = {}
        for rollout in sorted(each.rollout for each in manifest.plan.rollouts):
            group = rollout.rpartition("-")[0]
            worth = {
                id: 2 * result["rewards"]["right"] + result["rewards"]["brief"]
                for id, result in played.items()
                if id.startswith(f"{group}-")
            }
            value = worth[rollout] - sum(worth.values()) / len(worth)
            (agent,) = played[rollout]["agents"]
            expected[rollout] = value - baselines[agent]
            baselines[agent] = 0.75 * baselines[agent] + 0.25 * (value + 1)
        yield step, expected


def test_rules_of_another_package_survive_kills_of_the_orchestrator(tmp_path: Path) -> None:
    variables = write_package(tmp_path)
    with pipeline_in(tmp_path / "pipeline", trainer={"max_steps_ahead": "unlimited"}) as pipeline:
        pipeline.new_run(
            "rules",
            advantages={"estimator": "own_package.rules:per_agent"},
            **{"environments.sums": {"use": "own_package.play:Duel"}},
        )
        cluster = pipeline.cluster
        cluster.config.write_text(cluster.config.read_text() + FILTERS)
        cluster.rollout_worker(**variables)
        cluster.compute_worker(**variables)
        orchestrators = []
        for point in ("estimated:2", "sealed", "composed"):
            killed = cluster.orchestrator(CRASH_AT=point, **variables)
            assert killed.wait(90) == -signal.SIGKILL, killed.text[-2000:]
            orchestrators.append(killed)
        orchestrators.append(cluster.orchestrator(**variables))
        result = pipeline.finish(orchestrators[-1])
        steps = dict(expected_advantages(pipeline))
        assert list(steps) == [0, 1, 2, 3]
        for step, expected in steps.items():
            manifest = pipeline.manifests[step]
            delivered = {rollout.rollout: rollout.advantage for rollout in manifest.plan.rollouts}
            assert delivered == pytest.approx({id: np.float32(value) for id, value in expected.items()}, abs=1e-6)
            assert json.loads(manifest.estimator_state or "")["state"]["steps"] == step + 1
        played = results(cluster)
        assert {name for name, n in result["filtered"].items() if n} >= {"thirds", "riches"}
        for rollout in (rollout for expected in steps.values() for rollout in expected):
            assert played[rollout]["completion_tokens"] % 3
            assert played[rollout]["reward"] < 10
        imported_by = set(map(int, Path(variables["OWN_RULES_LOG"]).read_text().split()))
        assert imported_by.isdisjoint(each.pid for each in orchestrators)


def test_rules_that_cannot_be_used_are_refused_before_a_rollout_is_planned(tmp_path: Path) -> None:
    variables = write_package(tmp_path)
    with cluster_in(tmp_path / "cluster") as cluster:
        cluster.config.write_text(cluster.config.read_text() + FILTERS.replace("rules:third", "rules:thrid"))
        no_filter = "filters.custom.thirds.use = 'own_package.rules:thrid': module own_package.rules has no 'thrid'"
        for estimator, code, message in (
            (
                "rlooo",
                2,
                "HEADPOND_ADVANTAGES__ESTIMATOR: advantages.estimator: 'rlooo' is not built in; did you mean 'rloo'?",
            ),
            ("own_package.rules:less_baseline", 2, "takes (batch, state): it must be a function of (group)"),
        ):
            changed = {"HEADPOND_ADVANTAGES__ESTIMATOR": estimator, **variables}
            run, worker = cluster.orchestrator(**changed), cluster.compute_worker(**changed)
            for process, exit_code in ((run, code), (worker, 1)):
                assert process.wait() == exit_code, process.text
                assert message in process.text
                assert "Traceback" not in process.text
                assert (no_filter in process.text) == (":" in estimator)
        run = cluster.orchestrator(HEADPOND_ENGINE__DIALECT="own_package.rules:per_agent", **variables)
        assert run.wait() == 2, run.text
        assert "engine.dialect = 'own_package.rules:per_agent' is not a subclass" in run.text
        assert not cluster.run_dir.exists()
