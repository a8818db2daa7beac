from pathlib import Path

import numpy as np
import pytest
from support.rollouts import MadeTurn, RolloutMaker, plan_of, seal
from support.stores import directory_store

from penstock.batches import BatchReader
from penstock.batches.annotations import STEPS_KEPT, read_annotations, read_means
from penstock.errors import BatchError
from penstock.store.files import FileStore


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    _seal(directory_store(tmp_path / "store"), 0)
    return tmp_path


def _seal(store: FileStore, step: int) -> None:
    maker = RolloutMaker(store=store, seed=step)
    made = [maker.make(f"g{step}-{n}", [[MadeTurn(context=5, completion=9)]], group=f"g{step}") for n in range(4)]
    seal(store, plan_of(made, step=step))


def test_annotated_logprobs_give_the_mismatch_with_the_sampler(run_dir: Path) -> None:
    reader = BatchReader(run_dir, data_rank=0, data_ranks=1, timeout_s=0)
    batch = next(reader)
    reader.annotate(batch, logprobs=[batch_part.logprobs + 0.1 for batch_part in batch.micro_batches()])
    arrays = read_annotations(run_dir, 0, 0)
    np.testing.assert_array_equal(arrays["logprobs"], batch.column("logprobs") + np.float32(0.1))
    means = read_means(run_dir)[0]
    assert means["kl"] == pytest.approx(np.expm1(0.1) - 0.1, rel=1e-3)
    assert means["mismatch_max"] == pytest.approx(0.1, rel=1e-3)


def test_other_names_are_averaged_over_the_loss_tokens(run_dir: Path) -> None:
    reader = BatchReader(run_dir, data_rank=0, data_ranks=1, timeout_s=0)
    batch = next(reader)
    reader.annotate(batch, entropy=[np.where(mb.loss_mask, 2.0, 100.0) for mb in batch.micro_batches()])
    assert read_means(run_dir)[0] == {"entropy": 2.0}


def test_a_wrong_length_and_a_wrong_name_are_refused(run_dir: Path) -> None:
    reader = BatchReader(run_dir, data_rank=0, data_ranks=1, timeout_s=0)
    batch = next(reader)
    with pytest.raises(BatchError, match="one value for each of the"):
        reader.annotate(batch, logprobs=[[0.0]])
    with pytest.raises(BatchError, match="name of small letters"):
        reader.annotate(batch, **{"a/b": [batch.column("logprobs")]})
    assert read_annotations(run_dir, 0, 0) == {}


def test_the_arrays_of_the_newest_steps_are_kept_and_the_means_of_all(run_dir: Path) -> None:
    store = directory_store(run_dir / "store")
    for step in range(1, STEPS_KEPT + 2):
        _seal(store, step)
    reader = BatchReader(run_dir, data_rank=0, data_ranks=1, timeout_s=0)
    for _ in range(STEPS_KEPT + 2):
        batch = next(reader)
        reader.annotate(batch, logprobs=[batch.column("logprobs")])
    assert [step for step in range(STEPS_KEPT + 2) if read_annotations(run_dir, step, 0)] == [*range(2, STEPS_KEPT + 2)]
    assert [*read_means(run_dir)] == [*range(STEPS_KEPT + 2)]


def test_a_trainer_that_goes_back_annotates_earlier_steps_again(run_dir: Path) -> None:
    store = directory_store(run_dir / "store")
    for step in range(1, STEPS_KEPT + 2):
        _seal(store, step)
    reader = BatchReader(run_dir, data_rank=0, data_ranks=1, timeout_s=0)
    for _ in range(STEPS_KEPT + 2):
        batch = next(reader)
        reader.annotate(batch, logprobs=[batch.column("logprobs")])
    resumed = BatchReader(run_dir, data_rank=0, data_ranks=1, timeout_s=0, resume_step=0)
    batch = next(resumed)
    resumed.annotate(batch, logprobs=[batch.column("logprobs")])
    assert read_annotations(run_dir, batch.step, 0), "step 1, although later steps were annotated before"
