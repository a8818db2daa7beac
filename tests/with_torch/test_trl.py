"""TRL's own trainers, on CPU, read sealed steps of a run."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stores import directory_store
from support.tokenizer_directory import tokenizer_dir
from support.torch_batches import model_of, seal_groups
from support.waiting import wait_until
from transformers import AutoTokenizer
from trl.experimental.async_grpo import async_grpo_trainer, packing

from examples import trl_async_grpo, trl_grpo
from headpond.batches import read_manifest
from headpond.batches.signals import RunStatus, read_trainer, write_status
from headpond.errors import BatchError
from headpond.trainers import trl as adapter
from headpond.trainers.trl import HeadpondRollouts, HeadpondWorker
from headpond.trainers.weights import PublishedWeights

COMMON: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "learning_rate": 1e-3,
    "save_strategy": "no",
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "constant",
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    model_of("dense").save_pretrained(directory)
    files = tokenizer_dir(tmp_path / "tokenizer", tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>")
    loaded = AutoTokenizer.from_pretrained(files or tmp_path / "tokenizer")
    loaded.pad_token, loaded.eos_token = loaded.convert_ids_to_tokens([0, 1])  # the model's vocabulary is small
    loaded.save_pretrained(directory)
    return directory


def weights_of(model: Any) -> Any:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def test_grpo_trainer_trains_on_the_steps_of_a_run(tmp_path: Path, model_dir: Path) -> None:
    seal_groups(tmp_path, steps=2)
    options = {"num_generations": 2, "per_device_train_batch_size": 4, "max_steps": 2, "beta": 0.0, **COMMON}
    trainer = trl_grpo.main(str(tmp_path), str(model_dir), str(tmp_path / "out"), **options)
    state = read_trainer(tmp_path)
    assert state.acked == 1
    assert not torch.equal(weights_of(model_of("dense")), weights_of(trainer.model))
    assert state.policy is not None
    assert state.policy.version == 2, "one for each step"
    reloaded = type(trainer.model).from_pretrained(state.policy.weights)
    assert torch.equal(weights_of(reloaded), weights_of(trainer.model))
    logged = [entry["rewards/reward/mean"] for entry in trainer.state.log_history if "rewards/reward/mean" in entry]
    steps = [rewards_of(tmp_path, step) for step in range(2)]
    assert logged == pytest.approx([sum(rewards) / len(rewards) for rewards in steps], rel=1e-4)


def rewards_of(run_dir: Path, step: int) -> list[float]:
    manifest = read_manifest(directory_store(run_dir / "store"), step)
    assert manifest
    return [rollout.reward for rollout in manifest.plan.rollouts]


def test_a_step_that_does_not_fit_names_the_settings(tmp_path: Path) -> None:
    seal_groups(tmp_path, steps=1, size=3)
    with pytest.raises(BatchError, match=r"rollouts.group_size = 2.*batch.size = 2"):
        HeadpondRollouts(tmp_path, timeout_s=0)(["a"] * 4, type("Trainer", (), {"num_generations": 2}))


def segment_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, tree_kv_index: Any, tree_cu_seqlens_q: Any,
    tree_cu_seqlens_k: Any, scaling: Any = None, **_: Any,
) -> tuple[Any, None]:  # fmt: skip
    """TRL's tree attention without a GPU's kernel: each segment sees its path, itself causally."""
    key, value = (x.index_select(2, tree_kv_index) for x in (key, value))
    parts = []
    for at in range(len(tree_cu_seqlens_q) - 1):
        q = query[:, :, tree_cu_seqlens_q[at] : tree_cu_seqlens_q[at + 1]]
        k, v = (x[:, :, tree_cu_seqlens_k[at] : tree_cu_seqlens_k[at + 1]] for x in (key, value))
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scaling, enable_gqa=True)
        )
    return torch.cat(parts, 2).transpose(1, 2), None


def test_async_grpo_trainer_trains_publishes_and_acknowledges(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "tree_attention", segment_attention)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # asks CUDA for its name
    seal_groups(tmp_path, steps=6)  # a row of TRL closes with the first sample that does not fit
    write_status(tmp_path, RunStatus(why="over", ended=True, last_step=5))
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, **COMMON}
    trainer = trl_async_grpo.main(
        str(tmp_path), str(model_dir), str(tmp_path / "out"), token_budget=32, max_staleness=9, **options
    )
    state = read_trainer(tmp_path)
    assert state.acked >= 1
    assert state.policy is not None
    assert state.policy.version == 3
    reloaded = type(trainer.model).from_pretrained(state.policy.weights)
    assert not torch.equal(weights_of(reloaded), weights_of(model_of("dense")))
    assert torch.allclose(weights_of(reloaded), weights_of(model_of("dense")), atol=0.05)


# The worker's two threads


def take(worker: HeadpondWorker, count: int) -> list[Any]:
    return [worker.rollout_buffer.get(timeout=30) for _ in range(count)]


def acked(run_dir: Path) -> int:
    return read_trainer(run_dir).acked


def test_a_step_is_acknowledged_when_its_last_sample_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seal_groups(tmp_path, steps=3)  # of four samples
    monkeypatch.setattr(adapter, "QUEUED", 1)  # so that the thread waits for the trainer after each sample
    worker = HeadpondWorker(tmp_path)
    worker.start()
    for taken in range(1, 10):
        take(worker, 1)
        if taken % 4 == 1:  # the first of a step is taken, so the step before has been queued to its end
            wait_until(worker.rollout_buffer.full, what="the next sample")
            worker.update_model_version(taken)
        assert acked(tmp_path) == (taken - 1) // 4 - 1
    worker.stop()


def test_a_step_whose_reading_was_stopped_is_not_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seal_groups(tmp_path, steps=1)
    monkeypatch.setattr(adapter, "QUEUED", 3)  # of its four samples
    worker = HeadpondWorker(tmp_path)
    threads = set(threading.enumerate())
    worker.start()
    [reading] = set(threading.enumerate()) - threads
    wait_until(worker.rollout_buffer.full, what="three samples")
    worker.stop()
    reading.join(30)
    assert not reading.is_alive()
    take(worker, 3)
    worker.update_model_version(2)
    assert acked(tmp_path) == -1


def test_the_end_of_a_run_is_reported_when_every_sample_is_taken(tmp_path: Path) -> None:
    seal_groups(tmp_path, steps=1)
    write_status(tmp_path, RunStatus(why="over", ended=True, last_step=0))
    worker = HeadpondWorker(tmp_path)
    threads = set(threading.enumerate())
    worker.start()
    for reading in set(threading.enumerate()) - threads:
        reading.join(30)
    worker.check_health(1.0)
    take(worker, 4)
    with pytest.raises(BatchError, match="the run has ended and all its samples are taken: set max_steps"):
        worker.check_health(1.0)


def test_a_run_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    seal_groups(tmp_path, steps=1)
    for path in (tmp_path / "store").rglob("rank_*"):
        path.unlink()
    worker = HeadpondWorker(tmp_path)
    worker.start()

    def reported() -> bool:
        try:
            worker.check_health(1.0)
        except BatchError as error:
            return "the run cannot be read" in str(error)
        return False

    wait_until(reported, what="the failure")


def test_a_trainer_that_is_started_again_counts_steps_and_versions_on(tmp_path: Path, model_dir: Path) -> None:
    """Version 1 of the first trainer is in the engine: the weights that the second one begins with are version 2."""
    seal_groups(tmp_path, steps=2)
    parameters = list(model_of("dense").named_parameters())
    for begins_with, published in ((0, [None, 1]), (2, [2, 3])):
        weights = PublishedWeights(model_dir, tmp_path / "weights")
        worker = HeadpondWorker(tmp_path, weights)
        step = acked(tmp_path) + 1
        found = list[int | None]()
        for trls_version in (1, 2):
            weights.send_weights(iter(parameters))
            worker.update_model_version(trls_version)
            policy = read_trainer(tmp_path).policy
            found.append(policy.version if policy else None)
            if trls_version == 1:
                worker.start()
                samples = take(worker, 4)
        assert found == published
        assert {sample.group_id >> 20 for sample in samples} == {step}
        # Version 0 sampled them. TRL calls the weights that it begins with 1, so version 0 of the run is older.
        assert {sample.model_version for sample in samples} == {1 - begins_with}
        wait_until(lambda worker=worker, step=step: acknowledges(worker, tmp_path, step), what="the acknowledgement")
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["1", "2", "3"]


def acknowledges(worker: HeadpondWorker, run_dir: Path, step: int) -> bool:
    """All samples are taken; the thread may still be about to note that it has queued them."""
    worker.stop() if acked(run_dir) == step else worker.update_model_version(2)
    return acked(run_dir) == step
