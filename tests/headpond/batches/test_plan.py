import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headpond.batches.plan import Normalise, Oversize, Packing, PackingRules, pack, positions, segments
from headpond.errors import ConfigError, StageError

SEQ_LEN = 32
lengths_strategy = st.lists(st.integers(1, 48), max_size=40)
rules_strategy = st.builds(
    PackingRules,
    data_ranks=st.integers(1, 5),
    seq_len=st.just(SEQ_LEN),
    pad_to_multiple_of=st.sampled_from([1, 8]),
    oversize=st.sampled_from(["cut", "mask", "drop"]),
    attention_cost=st.sampled_from([0.0, 0.01]),
)


def rules(*, data_ranks: int = 2, oversize: Oversize = "mask", attention_cost: float = 0.0) -> PackingRules:
    return PackingRules(data_ranks=data_ranks, seq_len=SEQ_LEN, oversize=oversize, attention_cost=attention_cost)


def packed(lengths: list[int], wanted: PackingRules) -> Packing:
    return pack(np.array(lengths, np.int64), wanted)


@given(lengths_strategy, rules_strategy)
def test_every_sample_is_placed_once_within_seq_len_and_ranks_have_as_many_micro_batches(
    lengths: list[int], wanted: PackingRules
) -> None:
    packing = packed(lengths, wanted)
    placed = [sample for rank in packing.ranks for batch in rank for sample in batch]
    dropped = {sample for sample, n in enumerate(lengths) if n > SEQ_LEN and wanted.oversize == "drop"}
    assert sorted([*placed, *dropped]) == list(range(len(lengths)))
    assert len(packing.ranks) == wanted.data_ranks
    assert len({len(rank) for rank in packing.ranks}) == 1
    for batch in itertools.chain.from_iterable(packing.ranks):
        cu_seqlens = segments(packing.lengths[batch], wanted.pad_to_multiple_of)
        assert 0 < cu_seqlens[-1] <= SEQ_LEN
        assert cu_seqlens[-1] % wanted.pad_to_multiple_of == 0


@given(lengths_strategy, st.integers(1, 5), st.sampled_from([0.0, 0.01]))
def test_ranks_differ_by_at_most_one_sample_in_load(lengths: list[int], data_ranks: int, attention_cost: float) -> None:
    packing = packed(lengths, rules(data_ranks=data_ranks, attention_cost=attention_cost))
    costs = [n + attention_cost * n**2 for n in packing.lengths]
    loads = [sum(costs[sample] for batch in rank for sample in batch) for rank in packing.ranks]
    assert max(loads) - min(loads) <= max(costs, default=0) + 1e-9


def test_first_fit_decreasing_fills_the_first_micro_batch_that_has_room() -> None:
    packing = packed([6, 20, 12, 10, 16], rules(data_ranks=1))
    assert packing.ranks == [[[1, 2], [4, 3, 0]]]


def test_more_ranks_than_samples_get_fillers() -> None:
    packing = packed([5, 7], rules(data_ranks=4))
    assert packing.ranks == [[[1]], [[0]], [[]], [[]]]
    assert segments([], 8).tolist() == [0, 8], "a filler is one segment of padding, never of no tokens"
    assert segments([], 1).tolist() == [0, 1]


def test_no_samples_give_no_micro_batches() -> None:
    assert packed([], rules(data_ranks=3)).ranks == [[], [], []]


@pytest.mark.parametrize(("oversize", "kept"), [("cut", 32), ("mask", 32), ("drop", 0)])
def test_a_sample_longer_than_seq_len_follows_the_oversize_rule(oversize: Oversize, kept: int) -> None:
    packing = packed([40, 32], rules(oversize=oversize))
    assert packing.lengths.tolist() == [kept, 32]
    assert packing.oversized.tolist() == [True, False]


def test_a_sample_longer_than_seq_len_can_fail_the_step() -> None:
    with pytest.raises(StageError, match=r"1 samples .*seq_len \(32\).* 33"):
        packed([33, 32], rules(oversize="fail"))


def test_a_sample_without_tokens_is_refused() -> None:
    with pytest.raises(StageError, match="sample 1 of the batch has no tokens"):
        packed([3, 0], rules())


def test_padding_is_a_segment_with_its_own_positions() -> None:
    cu_seqlens = segments([3, 2], 8)
    assert cu_seqlens.tolist() == [0, 3, 5, 8]
    assert positions(cu_seqlens).tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert segments([5, 3], 8).tolist() == [0, 5, 8], "nothing to pad, no segment"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"data_ranks": 0}, "at least 1"),
        ({"pad_to_multiple_of": 5}, "multiple of pad_to_multiple_of"),
        ({"token_cost": 0.0}, "one of them above 0"),
    ],
)
def test_contradictory_packing_rules_are_refused(wrong: dict[str, float], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        PackingRules(**{"data_ranks": 1, "seq_len": SEQ_LEN, **wrong})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "weight", "denominator"),
    [("token", 1.0, 100), ("sample", 1 / 20, 7), ("rollout", 1 / 50, 3), ("constant:4", 1 / 4, 3)],
)
def test_normalise_gives_token_weights_and_the_denominator(text: str, weight: float, denominator: int) -> None:
    normalise = Normalise.parse(text)
    assert normalise.weight(loss_tokens=20, rollout_loss_tokens=50) == weight
    assert normalise.denominator(loss_tokens=100, samples=7, rollouts=3) == denominator
    assert normalise.denominator(loss_tokens=0, samples=0, rollouts=0) == 1


@pytest.mark.parametrize("text", ["", "tokens", "token:3", "constant", "constant:0", "constant:-2", "constant:nan"])
def test_an_unknown_normalise_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match='use "token", "sample", "rollout" or "constant:L"'):
        Normalise.parse(text)
