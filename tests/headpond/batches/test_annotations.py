import json
from pathlib import Path

import numpy as np
import pytest
from support.rollouts import MadeTurn, RolloutMaker, plan_of, seal
from support.stores import directory_store

from headpond.batches import BatchReader
from headpond.batches.annotations import STEPS_KEPT, Means, read_annotations
from headpond.errors import BatchError
from headpond.store.files import FileStore


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    _seal(directory_store(tmp_path / "store"), 0)
    return tmp_path


def _seal(store: FileStore, step: int) -> None:
    maker = RolloutMaker(store=store, seed=step)
    made = [maker.make(f"g{step}-{n}", [[MadeTurn(context=5, completion=9)]], group=f"g{step}") for n in range(4)]
    seal(store, plan_of(made, step=step))


def read_means(run_dir: Path) -> dict[int, dict[str, float]]:
    means = Means(run_dir)
    assert means.read(1 << 20)
    return means.by_step


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
    assert sorted(read_means(run_dir)) == [*range(STEPS_KEPT + 2)]


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


def line(step: int, entropy: float, loss_tokens: int = 1) -> str:
    return json.dumps({"step": step, "loss_tokens": loss_tokens, "entropy": entropy}) + "\n"


@pytest.fixture
def ranks(tmp_path: Path) -> list[Path]:
    (tmp_path / "trainer").mkdir()
    return [tmp_path / "trainer" / f"annotations.rank_{rank:02d}.jsonl" for rank in range(2)]


def test_only_what_was_appended_is_read(tmp_path: Path, ranks: list[Path]) -> None:
    means = Means(tmp_path)
    ranks[0].write_text("".join(line(step, 1.0) for step in range(1000)))
    size = ranks[0].stat().st_size
    assert means.read(1 << 20) == size
    with ranks[0].open("r+") as file:
        file.write(line(0, 9.0))  # seen only by a reader that begins at the beginning
        file.seek(0, 2)
        file.write(line(1000, 2.0) + line(1000, 3.0) + '{"step": 1001, "lo')
    assert means.read(1 << 20) == 2 * len(line(1000, 2.0))
    assert [means.by_step[step]["entropy"] for step in (0, 999, 1000)] == [1.0, 1.0, 3.0], "the last line of a step"
    assert 1001 not in means.by_step
    assert means.read(1 << 20) == 0
    ranks[0].write_text(line(1001, 4.0))  # the file was full
    assert means.read(1 << 20) == len(line(1001, 4.0))
    assert means.by_step[1001] == {"entropy": 4.0}
    assert means.by_step[999] == {"entropy": 1.0}


def test_a_read_is_bounded_and_the_next_one_continues(tmp_path: Path, ranks: list[Path]) -> None:
    means = Means(tmp_path)
    for number, rank in enumerate(ranks):
        rank.write_text("".join(line(step, float(number), 1 + 2 * number) for step in range(100)))
    reads = 0
    while means.read(1000):
        reads += 1
    assert reads >= sum(rank.stat().st_size for rank in ranks) / 1000
    assert set(means.by_step) == {*range(100)}
    assert {values["entropy"] for values in means.by_step.values()} == {0.75}, "weighted by loss tokens"


def test_a_step_that_is_annotated_again_long_after_has_the_mean_of_those_who_did(
    tmp_path: Path, ranks: list[Path]
) -> None:
    means = Means(tmp_path, lines_most=20)
    for step in range(15):
        for rank in ranks:
            with rank.open("a") as file:
                file.write(line(step, 1.0))
        means.read(1 << 20)
    assert set(means.by_step) == {*range(15)}, "means are kept when the lines of their ranks are not"
    for rank in ranks:
        with rank.open("a") as file:
            file.write(line(0, 5.0))
        means.read(1 << 20)
    assert means.by_step[0] == {"entropy": 5.0}
    for step in range(15, 40):
        ranks[0].open("a").write(line(step, 1.0))
        means.read(1 << 20)
    assert set(means.by_step) == {*range(20, 40)}
