"""What a token was drawn from, up to the trainer's micro-batch."""

from pathlib import Path

import pytest
from support.rollouts import drawn, plan_of, seal
from support.stores import directory_store

from headpond.batches import BatchReader
from headpond.config import RunConfig
from headpond.config.engine import Engine, Policy, Sampling
from headpond.doctor.findings import Level
from headpond.doctor.probes import check_sampling


def test_each_token_says_whether_its_distribution_is_known(tmp_path: Path) -> None:
    store = directory_store(tmp_path / "store")
    seal(store, plan_of([drawn(store, "a", masks=True), drawn(store, "b", masks=False)]))
    [mb] = next(BatchReader(tmp_path, data_rank=0, data_ranks=1)).micro_batches()
    support = mb.sampling_support()
    for sample, name in enumerate(mb.samples.rollout_index.tolist()):
        start, stop = mb.cu_seqlens[sample : sample + 2]
        truncated = 1 if name == 0 else 2
        assert mb.sampling[start:stop].tolist() == [0] * 7 + [truncated] * 3 + [0] * 2 + [2] * 3
        sets = [support.ids[slice(*support.offsets[at : at + 2])].tolist() for at in range(start, stop)]
        if name == 0:
            assert sets[7:10] == [[100, 101], [102], [103, 104, 105]]
        assert [len(each) for each in sets[:7]] == [0] * 7
    assert support.offsets.size == mb.input_ids.size + 1
    assert not mb.sampling[mb.cu_seqlens[2] :].any(), "padding"


@pytest.mark.parametrize(
    ("sampling", "masks", "level", "text"),
    [
        ({}, False, None, ""),
        ({"top_p": 1.0, "top_k": -1}, False, None, ""),
        ({"top_p": 0.9}, False, Level.NOTE, "top_p, and what is left is not recorded"),
        ({"top_p": 0.9}, True, Level.OK, "are recorded for the trainer"),
        ({"top_k": 5, "presence_penalty": 0.5}, True, Level.NOTE, "presence_penalty, which no engine records"),
    ],
)
def test_the_doctor_warns_of_sampling_that_is_not_recorded(
    sampling: dict[str, float], masks: bool, level: Level | None, text: str
) -> None:
    policy = Policy(sampling=Sampling.model_validate(sampling))
    found = check_sampling(policy, Engine(dialect="generate", sampling_masks=masks))
    assert (found and found.level) == level
    assert text in (found.text if found else "")


def test_prime_rls_formats_refuse_sampling_masks() -> None:
    engine = {"dialect": "generate", "sampling_masks": True}
    with pytest.raises(ValueError, match="cannot hold them"):
        RunConfig.model_validate({"engine": engine, "batch": {"format": "prime-rl"}})
