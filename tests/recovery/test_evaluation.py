"""Evaluations across kills of orchestrator and workers: every rollout once, none in a step, every result reported."""

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster, assert_nothing_left_in_redis, cluster_in
from support.stores import directory_store
from support.waiting import HANG_S, wait_until

from headpond.batches import read_manifests
from headpond.batches.signals import PublishedPolicy, RankProgress, write_policy, write_progress

EVALUATION = {"use": "noop", "every": 2, "examples": 5, "rollouts": 3}
EVALUATED_GROUPS = "SELECT id FROM groups WHERE purpose = 'evaluation'"
CLOSED_GROUPS = """
SELECT printf('g%07d', ordinal) FROM closed_groups JOIN names ON names.id = environment WHERE name = 'held_out'"""
EVALUATED_4 = 'headpond_evaluation_version{evaluation="held_out"} 4.0'


def lines(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    path = cluster.run_dir / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def publish(cluster: Cluster, version: int) -> None:
    (cluster.run_dir / "trainer").mkdir(parents=True, exist_ok=True)
    write_policy(cluster.run_dir, PublishedPolicy(version=version, weights=None))


def evaluated(cluster: Cluster, version: int) -> bool:
    return any(line["version"] == version for line in lines(cluster, "evaluations.jsonl"))


def scraped(cluster: Cluster) -> str:
    return urllib.request.urlopen(f"{cluster.status().http}/metrics", timeout=HANG_S).read().decode()


def test_killed_processes_neither_lose_nor_repeat_a_rollout_of_an_evaluation(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    settings = {"evaluation.held_out": EVALUATION, "noop": {"hold_while": str(hold)}}
    with cluster_in(tmp_path, steps=4, **settings) as cluster:
        hold.touch()
        worker = cluster.rollout_worker(concurrency=128)  # more than there are rollouts
        cluster.compute_worker()
        for point in ("submitted:2", "published"):  # the first submission is the survey's
            crashed = cluster.orchestrator(CRASH_AT=point)
            assert crashed.wait() == -signal.SIGKILL, crashed.text[-2000:]
        killed = cluster.orchestrator()
        group = wait_until(lambda: cluster.ledger(EVALUATED_GROUPS), what="a group of the evaluation")[0][0]
        cluster.wait_running(3, of=f".{group}-")
        killed.kill()
        worker.kill()
        hold.unlink()
        cluster.rollout_worker()
        crashed = cluster.orchestrator(CRASH_AT="replies_read")
        assert crashed.wait() == -signal.SIGKILL, crashed.text[-2000:]
        run = cluster.orchestrator()
        wait_until(lambda: evaluated(cluster, 0), what="the evaluation of version 0")
        assert run.wait() == 0, run.text[-3000:]
        audited = cluster.audit()
        assert audited["balanced"], audited["problems"]
        assert (audited["planned"], audited["delivered"], audited["steps"]) == (64, 64, 4)
        (line,) = lines(cluster, "evaluations.jsonl")
        assert (line["evaluation"], line["name"], line["rollouts"], line["dead"]) == (1, "held_out", 15, 0)
        status = cluster.status().evaluations
        assert status["rollouts"] == {
            "planned": 15, "evaluated": 15, "dead": 0, "cancelled": 0, "in_flight": 0, "balanced": True,
        }  # fmt: skip
        assert status["names"]["held_out"] == {"last": line, "running": None}
        rewards = cluster.ledger("SELECT reward FROM all_rollouts WHERE state = 'evaluated' AND reason IS NULL")
        assert sum(float(reward) for (reward,) in rewards) / 15 == pytest.approx(line["reward_mean"], rel=1e-5)
        trained = {r.group for m in read_manifests(directory_store(cluster.store)).values() for r in m.plan.rollouts}
        evaluated_groups = {group for (group,) in cluster.ledger(CLOSED_GROUPS)}
        assert len(evaluated_groups) == 5
        assert not trained & evaluated_groups
        assert not list((cluster.store / "rollouts").rglob("*.safetensors"))
        assert_nothing_left_in_redis(cluster)
        shown = cluster.headpond("status", str(cluster.run_dir))
        assert "evaluation" in shown.text
        assert "held_out: version 0: reward" in shown.text


def test_every_second_version_is_evaluated_and_reported_with_the_next_step(tmp_path: Path) -> None:
    settings = {"evaluation.held_out": EVALUATION, "trainer": {"max_steps_ahead": 1}}
    with cluster_in(tmp_path, steps=7, **settings) as cluster:  # two more than are looked at: it is not over before
        cluster.rollout_worker()
        cluster.compute_worker()
        run = cluster.orchestrator()
        for step in range(5):
            wait_until(lambda step=step: cluster.status().step > step, what=f"step {step}")
            publish(cluster, step + 1)
            if (step + 1) % 2 == 0:
                wait_until(lambda step=step: evaluated(cluster, step + 1), what=f"the evaluation of version {step + 1}")
            if step == 4:
                # the status is written once a second
                wait_until(lambda: EVALUATED_4 in scraped(cluster), what="a status with the evaluation of version 4")
                assert 'headpond_evaluation_rollouts{state="evaluated"} 45.0' in scraped(cluster)
            write_progress(
                cluster.run_dir, RankProgress(data_rank=0, data_ranks=1, epoch=1, resume_step=-1, acked=step)
            )
        assert run.wait() == 0, run.text[-3000:]
        results = lines(cluster, "evaluations.jsonl")
        assert [line["version"] for line in results] == [0, 2, 4]
        assert [line["evaluation"] for line in results] == [1, 2, 3]
        steps = [line for line in lines(cluster, "metrics.jsonl") if "evaluation/held_out/version" in line]
        assert [line["evaluation/held_out/version"] for line in steps] == [0, 2, 4]
        means = [line["evaluation/held_out/reward_mean"] for line in steps]
        assert means == [line["reward_mean"] for line in results]
        assert cluster.audit()["balanced"]
