"""Killed processes and damaged blobs with real stages: every step is delivered once, without damaged rollouts."""

import os
import signal
from collections.abc import Iterator

import pytest
from support.cluster import Process
from support.pipeline import Pipeline, hashes, pipeline_in, wait_state
from support.waiting import wait_until

SLOW_ENGINE = ("--latency", "uniform:0.05:0.4")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with pipeline_in(tmp_path_factory.mktemp("pipeline"), *SLOW_ENGINE, trainer={"max_steps_ahead": 2}) as pipeline:
        yield pipeline


def test_the_run_waits_for_a_killed_engine_and_survives_a_killed_worker(pipeline: Pipeline) -> None:
    pipeline.new_run("engine")
    cluster = pipeline.cluster
    worker = cluster.rollout_worker()
    cluster.compute_worker()
    run, trainer = cluster.orchestrator(), pipeline.trainer()
    cluster.wait_running(4)
    pipeline.engine.kill()
    wait_until(lambda: "engine" in str(cluster.status().waiting_for), what="the status to name the engine")
    pipeline.restart_engine("--layers", "4", *SLOW_ENGINE)
    cluster.wait_running(4)
    worker.kill()
    cluster.rollout_worker()
    result = pipeline.finish(run, trainer)
    assert result["dead"] == 0
    assert sorted(hashes(trainer)) == list(range(4))


def test_a_repeatedly_killed_orchestrator_delivers_every_step_once(pipeline: Pipeline) -> None:
    pipeline.new_run("orchestrator")
    cluster = pipeline.cluster
    cluster.rollout_worker()
    cluster.compute_worker()
    trainer = pipeline.trainer()
    for point in ("replies_committed:20", "composed", "encoded:2", "sealed:2"):
        killed = cluster.orchestrator(CRASH_AT=point)
        assert killed.wait() == -signal.SIGKILL, killed.text[-2000:]
    pipeline.finish(cluster.orchestrator(), trainer)
    assert sorted(hashes(trainer)) == list(range(4))


def damage(pipeline: Pipeline, rollouts: list[str]) -> None:
    """Flip a bit of one file, truncate one, delete one."""
    run = next((pipeline.cluster.store / "rollouts").iterdir())
    files = [next((run / rollout).rglob("columns.safetensors")) for rollout in rollouts]
    content = bytearray(files[0].read_bytes())
    content[-1] ^= 1
    files[0].write_bytes(content)
    files[1].write_bytes(files[1].read_bytes()[:100])
    files[2].unlink()


def rollouts_in(pipeline: Pipeline, state: str) -> list[str]:
    rows = pipeline.cluster.ledger(f"SELECT grp || '-' || idx FROM rollouts WHERE state = '{state}' ORDER BY 1 LIMIT 3")
    return [rollout for (rollout,) in rows]


def test_blobs_damaged_before_batching_are_filtered_as_corrupt(pipeline: Pipeline) -> None:
    pipeline.new_run("damaged-early")
    cluster = pipeline.cluster
    cluster.rollout_worker()
    run, trainer = cluster.orchestrator(), pipeline.trainer()
    wait_state(cluster, "generated", 3)
    gone = rollouts_in(pipeline, "generated")
    damage(pipeline, gone)
    cluster.compute_worker()
    result = pipeline.finish(run, trainer)
    assert result["filtered"]["blob_corrupt"] == 3
    assert result["dead"] == 0
    delivered = {rollout.rollout for manifest in pipeline.manifests.values() for rollout in manifest.plan.rollouts}
    assert not delivered & set(gone)


def test_blobs_damaged_after_batching_are_removed_and_the_step_is_formed_again(
    pipeline: Pipeline,
) -> None:
    pipeline.new_run("damaged-late")
    cluster = pipeline.cluster
    cluster.rollout_worker()
    pipeline.compute("filtering,advantages")
    run, trainer = cluster.orchestrator(), pipeline.trainer()
    wait_state(cluster, "batched", 3)
    gone = rollouts_in(pipeline, "batched")
    damage(pipeline, gone)
    pipeline.encoder()
    result = pipeline.finish(run, trainer)
    assert result["filtered"]["blob_corrupt"] == 3
    assert "action=step_formed_again step=0 unreadable=" in run.text
    assert sorted(hashes(trainer)) == list(range(4))


def test_an_encoder_resumed_after_its_step_was_formed_again_is_fenced(pipeline: Pipeline) -> None:
    pipeline.new_run("paused-encoder", trainer={"max_steps_ahead": "unlimited"}, steps=12)
    cluster = pipeline.cluster
    cluster.rollout_worker()
    pipeline.compute("filtering,advantages")
    paused = pipeline.encoder()
    wait_until(lambda: "ready." in paused.text, what="the encoder")
    run = cluster.orchestrator()
    step = pause_while_encoding(pipeline, paused)
    gone = rollouts_in(pipeline, "batched")
    damage(pipeline, gone)
    pipeline.encoder()
    wait_until(lambda: step in pipeline.manifests, what=f"step {step} to be sealed by another encoder")
    for pid in (paused.pid, *paused.children()):
        os.kill(pid, signal.SIGCONT)
    result = pipeline.finish(run)
    assert result["filtered"]["blob_corrupt"] == 3
    assert not {rollout.rollout for rollout in pipeline.manifests[step].plan.rollouts} & set(gone)


def pause_while_encoding(pipeline: Pipeline, encoder: Process) -> int:
    """Pause the encoder in the middle of a job. Returns the step."""
    cluster = pipeline.cluster
    (child,) = encoder.children()
    for _ in range(12):
        lease = wait_until(lambda: next((each for each in cluster.leases() if ".s0" in each), ""))
        for pid in (child, encoder.pid):
            os.kill(pid, signal.SIGSTOP)
        job = lease.split(".")[1]
        if (
            cluster.ledger(f"SELECT 1 FROM jobs WHERE id = '{job}' AND state = 'submitted'")
            and lease in cluster.leases()
        ):
            return int(job[1:7])
        for pid in (child, encoder.pid):
            os.kill(pid, signal.SIGCONT)
    raise AssertionError("the encoder was never paused during a job")


def test_a_trainer_resumed_20_steps_back_gets_the_same_batches(pipeline: Pipeline) -> None:
    pipeline.new_run("resumed", steps=24, batch={"size": 1, "seq_len": 4096}, rollouts={"group_size": 2})
    cluster = pipeline.cluster
    cluster.rollout_worker()
    cluster.compute_worker()
    run, first = cluster.orchestrator(), pipeline.trainer(hang_at=21, checkpoint_every=100)
    wait_until(lambda: '"hangs": 21' in first.text, what="the trainer to be in the middle of step 21")
    first.kill()
    second = pipeline.trainer(resume_step=1, checkpoint_every=100)
    pipeline.finish(run, second)
    before, after = hashes(first), hashes(second)
    assert sorted(after) == list(range(2, 24))
    assert {step: after[step] for step in range(2, 21)} == {step: before[step] for step in range(2, 21)}
