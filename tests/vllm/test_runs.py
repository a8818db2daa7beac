"""Whole runs with a real engine: Redis, workers, orchestrator and a trainer that compares every token it gets."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.alignment import Alignment, Reference, Sample, Weights, align, of_batch
from support.cluster import Cluster, cluster_in
from support.vllm_playing import ENVIRONMENT
from support.vllm_server import Release, VllmServer
from support.waiting import HANG_S, wait_until

from headpond.batches import BatchReader

STEPS = 4
TOKENS = "vllm:generation_tokens_total"
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "batch": {"size": 3},
    "rollouts": {"group_size": 4, "max_in_flight": 24},
    "trainer": {"max_steps_ahead": 1},
    "policy.sampling": {"max_tokens": 32},
    "policy.sampling.more.chat_template_kwargs": {"enable_thinking": False},
    "filters.zero_variance": {"mode": "monitor"},
    "filters.overlong": {"mode": "monitor"},
    "environments.dialogue": {"use": ENVIRONMENT},
    "environments.dialogue.options": {"turns": 2},
}
ON_POLICY = {
    **SETTINGS,
    "trainer": {"max_steps_ahead": 0},
    "policy.sampling": {"max_tokens": 128},
    "policy.sampling.more": {"ignore_eos": True},
}
"""Every step is played by its own version, however fast the engine is, and long enough to kill a server meanwhile."""


@pytest.fixture
def cluster(server: VllmServer, release: Release, tmp_path: Path) -> Iterator[Cluster]:
    with cluster_in(tmp_path, **SETTINGS, engine=engine_of(server, release)) as cluster:
        yield cluster


def engine_of(server: VllmServer, release: Release, **more: Any) -> dict[str, Any]:
    return {"urls": [server.url], "routed_experts": release.has_routes, "unreachable_s": 2.0, **more}


class Run:
    """A run and its trainer: `after(step)` is called with each step, before it is acknowledged."""

    def __init__(self, cluster: Cluster, after: Callable[[int, BatchReader], None]) -> None:
        workers = cluster.rollout_worker(), cluster.compute_worker()
        orchestrator = cluster.orchestrator()
        reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=2 * HANG_S)
        self.samples: list[Sample] = []
        for batch in reader:
            self.samples += of_batch(batch)
            after(batch.step, reader)
            reader.ack(batch.step)
        assert orchestrator.wait() == 0, orchestrator.text[-3000:]
        assert all(worker.exit_code is None for worker in workers)
        self.audit = cluster.audit()
        assert self.audit["balanced"], self.audit["problems"]
        assert self.audit["dead"] == 0

    def aligned(self, reference: Reference, weights: Weights) -> Alignment:
        found = align(self.samples, reference, weights)
        assert not found.problems, found.problems[:10]
        return found


def test_a_run(cluster: Cluster, reference: Reference, weights: Weights, release: Release) -> None:
    run = Run(cluster, lambda step, reader: None)
    found = run.aligned(reference, weights)
    assert found.left_out == 0
    assert found.tokens == sum(int((sample.trained != 0).sum()) for sample in run.samples) > 0
    assert run.audit["delivered"] == STEPS * 3 * 4
    if release.has_routes:
        assert found.rows == sum(len(sample.ids) - 1 for sample in run.samples)


def test_weights_loaded_by_the_trainer(
    cluster: Cluster, reloading: VllmServer, reference: Reference, weights: Weights
) -> None:
    """While rollouts of later steps are played. Those of the last step begin when the first one is acknowledged, which
    is after the update."""

    def after(step: int, reader: BatchReader) -> None:
        if step == 0:
            reloading.load(weights[1], 1)
            reader.publish_policy(1)

    run = Run(cluster, after)
    found = run.aligned(reference, weights)
    assert found.versions == {0, 1}


def test_weights_loaded_by_the_run_into_a_server_that_is_killed(
    tmp_path: Path, reloading: VllmServer, release: Release, reference: Reference, weights: Weights
) -> None:
    """While it plays step 2. It starts again with its first weights, and samples nothing before it has those of the
    run."""
    server = reloading

    def after(step: int, reader: BatchReader) -> None:
        before = server.metric(TOKENS)
        if step + 1 in weights:
            reader.publish_policy(step + 1, weights=weights[step + 1])
        if step == 1:
            restart(cluster, server, after_tokens=before)

    try:
        with cluster_in(tmp_path, **ON_POLICY, engine=engine_of(server, release, weight_update="headpond")) as cluster:
            run = Run(cluster, after)
    finally:
        server.weights = None  # loaded by the run, under names of its own
    found = run.aligned(reference, weights)
    assert found.versions == {0, 1, 2, 3}
    assert found.tokens > found.left_out
    assert run.audit["delivered"] == STEPS * 3 * 4


@pytest.mark.slow
def test_a_killed_server_that_the_trainer_updates(
    tmp_path: Path, reloading: VllmServer, release: Release, reference: Reference, weights: Weights
) -> None:
    """While it plays step 2; the run waits until the trainer has loaded version 2 again."""
    server = reloading

    def after(step: int, reader: BatchReader) -> None:
        version = step + 1
        if version not in weights:
            return
        before = server.metric(TOKENS)
        server.load(weights[version], version)
        reader.publish_policy(version)
        if step == 1:
            restart(cluster, server, after_tokens=before)
            cluster.wait_waiting_for("calls its weights 'default'")
            server.load(weights[version], version)

    with cluster_in(tmp_path, **ON_POLICY, engine=engine_of(server, release)) as cluster:
        run = Run(cluster, after)
    found = run.aligned(reference, weights)
    assert found.versions == {0, 1, 2, 3}
    assert found.tokens > found.left_out


@pytest.mark.slow
def test_a_killed_server_without_updates(
    tmp_path: Path, server: VllmServer, release: Release, reference: Reference, weights: Weights
) -> None:
    """While it plays step 1; routed experts too are those of whole rollouts."""

    def after(step: int, reader: BatchReader) -> None:
        if step == 0:
            before = server.metric(TOKENS)
            reader.ack(step)  # rollouts of later steps begin
            restart(cluster, server, after_tokens=before)

    settings = {**ON_POLICY, "trainer": {"max_steps_ahead": 1}}
    with cluster_in(tmp_path, **settings, engine=engine_of(server, release)) as cluster:
        run = Run(cluster, after)
    found = run.aligned(reference, weights)
    assert found.tokens > found.left_out
    assert run.audit["delivered"] == STEPS * 3 * 4
    if release.has_routes:
        assert found.rows > 0


def restart(cluster: Cluster, server: VllmServer, *, after_tokens: float) -> None:
    """In the middle of the next step's rollouts: when it has sampled more than `after_tokens` since it started."""
    wait_until(lambda: server.metric(TOKENS) > after_tokens, what="rollouts of the next step")
    server.end()
    wait_until(lambda: cluster.status().waiting_for, what="the run to wait for the server")
    server.start()
    server.wait_ready()
