"""A run over a model that is trained while it plays: what a trainer computes again is what the engine sampled."""

from pathlib import Path
from typing import Any

import pytest
from support.cluster import cluster_in
from support.engine_process import running

from examples.numpy_trainer import StepReport, train
from headpond.demo import tiny_moe

SETTINGS: dict[str, Any] = {
    "steps": 4,
    "batch": {"size": 4, "seq_len": 4096},
    "rollouts": {"group_size": 4},
    "filters.zero_variance": {"mode": "monitor"},
    "environments.copy": {"use": "examples.small_tasks:Copy"},
    "environments.guess": {"use": "examples.small_tasks:Guess"},
}


def learned(tmp_path: Path, dialect: str, *, sampling: dict[str, Any], **more: Any) -> list[StepReport]:
    """The trainer ends with an error if a logprob that it computes again is off by 1e-4."""
    with running(tmp_path, "--model", "tiny-moe") as served:
        host, port = served.address
        shape = {"hidden_layers": tiny_moe.LAYERS, "experts_per_token": tiny_moe.TOPK, "moe_experts": tiny_moe.EXPERTS}
        engine = {"urls": [f"http://{host}:{port}"], "dialect": dialect, "routed_experts": True, **shape, **more}
        policy = {"seeded": True, **({"renderer": "bytes-chatml"} if dialect == "generate" else {})}
        settings = SETTINGS | {"engine": {**engine, "weight_update": "headpond"}, "policy": policy}
        settings |= {"policy.sampling": sampling}
        with cluster_in(tmp_path / "cluster", **settings) as cluster:
            cluster.store = cluster.run_dir / "store"
            cluster.configure(**settings)
            cluster.rollout_worker(concurrency=8)
            cluster.compute_worker()
            run = cluster.orchestrator()
            reports = list(train(cluster.run_dir, seed=0, keep_batches=False))
            assert run.wait() == 0, run.text[-3000:]
            assert cluster.audit()["balanced"]
    assert [report.step for report in reports] == [0, 1, 2, 3]
    return reports


def aligned_share(reports: list[StepReport]) -> float:
    return sum(report.aligned for report in reports) / sum(report.tokens for report in reports)


@pytest.mark.parametrize("dialect", ["generate", pytest.param("vllm", marks=pytest.mark.slow)])
def test_every_exact_logprob_is_that_of_its_version_and_experts(tmp_path: Path, dialect: str) -> None:
    """`generate` names the version of each token; for vLLM's chat, the replica is asked before and after."""
    share = aligned_share(learned(tmp_path, dialect, sampling={}))
    assert share > (0.9 if dialect == "generate" else 0.1)


@pytest.mark.parametrize("masks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_truncated_sampling_is_replayed_where_the_engine_recorded_it(tmp_path: Path, masks: bool) -> None:
    """Without masks every token says that its distribution is not known, and none is compared."""
    reports = learned(tmp_path, "generate", sampling={"top_k": 5, "temperature": 0.8}, sampling_masks=masks)
    share = aligned_share(reports)
    assert share > 0.9 if masks else share == 0
