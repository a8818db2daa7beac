"""From an engine's responses to a trainer's batches, with real processes and every stage."""

import json
import signal
from pathlib import Path

from support.cluster import cluster_in
from support.engine_process import EngineProcess
from support.pipeline import pipeline_in
from support.stores import directory_store
from support.waiting import wait_until

from headpond.batches import BatchReader, read_manifests
from headpond.commands.redone import Redo

ENVIRONMENTS = """
[environments.sums]
use = "arithmetic"
[environments.guess]
use = "guess"
[environments.distinct]
use = "distinct"
"""


def test_rollouts_of_three_environments_become_batches_and_are_released(tmp_path: Path) -> None:
    engine = EngineProcess(tmp_path, "--layers", "4")
    try:
        host, port = engine.address
        settings = {
            "engine": {"urls": [f"http://{host}:{port}"], "routed_experts": True},
            "policy": {"seeded": True},
            "batch": {"size": 6, "seq_len": 4096},
            "trainer": {"max_steps_ahead": 1},
        }
        with cluster_in(tmp_path / "a run", **settings) as cluster:  # its store has a percent-encoded URL
            cluster.add_environments(ENVIRONMENTS)
            cluster.rollout_worker()
            cluster.compute_worker()
            run = cluster.orchestrator()
            reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60)
            for batch in reader:
                rows = [micro_batch.routed_experts(layers=[0, 3], missing=-1) for micro_batch in batch.micro_batches()]
                assert sum(map(len, rows)) >= batch.totals.tokens
                assert batch.totals.groups == 6
                reader.ack(batch.step)
                reader.publish_policy(batch.step + 1)
                reader.checkpointed(batch.step)
            assert run.wait() == 0, run.text
            assert f"batches    {cluster.store / 'batches'}\n" in run.text
            result = cluster.audit()
            assert result["balanced"], result["problems"]
            manifests = read_manifests(directory_store(cluster.store))
            assert [sorted({r.env for r in m.plan.rollouts}) for m in manifests.values()] == [
                ["distinct", "guess", "sums"]
            ] * 3
            assert_measured(cluster.run_dir)
            assert_redone(cluster.run_dir)
    finally:
        engine.end()


def assert_measured(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert {"reward_mean/distinct", "reward_mean/guess", "reward_mean/sums"} <= line.keys()
        assert 0 < line["prompt_tokens/min"] <= line["prompt_tokens/max"]
        assert line["tokens"] > line["loss_tokens"] > 0
        assert line["staleness_max"] <= 2
        assert line["entropy"] > 0


def assert_redone(run_dir: Path) -> None:
    """Unchanged settings give the same bytes for the steps whose columns are kept; others do not."""
    redo = Redo(run_dir)
    assert {1, 2} <= set(redo.steps())
    for step in map(redo.step, redo.steps()):
        assert step.same_bytes
        assert step.was == step.now
        assert [one for one in step.rollouts if one.why] == []
    other = Redo(run_dir, ["advantages.estimator=rloo"]).step(2)
    assert not other.same_bytes
    changed = [one for one in other.rollouts if one.was != one.now]
    assert {one.why for one in changed if one.was.dropped is None} == {"advantages.estimator = rloo"}


def test_prime_rl_steps_follow_its_trainers_broadcasts_and_are_removed_once_trained(tmp_path: Path) -> None:
    settings = {
        "batch": {"format": "prime-rl", "rollouts_jsonl": True},
        "trainer": {"max_steps_ahead": 1, "keep_steps": 0},
        "steps": 6,
    }
    with pipeline_in(tmp_path / "pipeline", **settings) as pipeline:
        pipeline.new_run("prime-rl")
        cluster, out = pipeline.cluster, pipeline.cluster.run_dir
        cluster.rollout_worker()
        cluster.compute_worker()
        killed = cluster.orchestrator(CRASH_AT="sealed")
        assert killed.wait() == -signal.SIGKILL, killed.text[-2000:]
        run = cluster.orchestrator()
        for step in range(1, 7):  # as prime-rl's trainer counts
            wait_until((out / "batches" / f"step_{step}" / "rank_0.bin").exists, what=f"step {step}")
            assert not (out / "batches" / f"step_{step + 2}").exists(), "one waits at most"
            broadcast = out / "broadcasts" / f"step_{step}"
            broadcast.mkdir(parents=True)
            (broadcast / ".sender_ready").touch()
            wait_until((broadcast / ".receiver_ready").exists, what=f"version {step} to be accepted")
            (broadcast / ".finished").touch()
            (out / "checkpoints" / f"step_{step}").mkdir(parents=True)
            if step == 3:  # two are checkpointed, and the run goes on
                wait_until(lambda: not (out / "batches" / "step_2").exists(), what="trained steps to be removed")
        assert run.wait() == 0, run.text[-2000:]
        names = sorted(path.name for path in (out / "batches" / "step_6").iterdir())
        assert names == ["rank_0.bin", "train_rollouts.jsonl"]
        assert not (out / "batches" / "step_1").exists()
