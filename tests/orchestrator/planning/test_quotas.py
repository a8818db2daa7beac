from hypothesis import given
from hypothesis import strategies as st
from support.ledgers import configured

from headpond.orchestrator.planning.quotas import apportion, quotas

SIZES = st.integers(1, 500)
WEIGHTS = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.01, 100), min_size=1)


@given(SIZES, WEIGHTS, st.integers(0, 100))
def test_quotas_add_up_to_the_size_and_each_is_within_one_of_its_weight(
    size: int, weights: dict[str, float], turn: int
) -> None:
    shares = apportion(size, weights, turn=turn)
    assert sum(shares.values()) == size
    for name, weight in weights.items():
        assert abs(shares[name] - size * weight / sum(weights.values())) < 1 + 1e-9


@given(SIZES, st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 9), min_size=1), st.integers(0, 100))
def test_quotas_do_not_depend_on_the_order_of_environments(size: int, weights: dict[str, float], turn: int) -> None:
    backwards = dict(reversed(list(weights.items())))
    assert apportion(size, weights, turn=turn) == apportion(size, backwards, turn=turn)


def test_a_whole_quota_is_exact() -> None:
    assert apportion(16, {"maths": 3, "games": 1}) == {"maths": 12, "games": 4}


def test_remainders_rotate() -> None:
    shares = [apportion(1, {"a": 1, "b": 1, "c": 1}, turn=turn) for turn in range(3)]
    assert [max(share, key=lambda name: share[name]) for share in shares] == ["a", "b", "c"]


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20)), st.integers(0, 9))
def test_what_one_environment_lacks_the_others_give(most: dict[str, int], step: int) -> None:
    config = configured(batch={"size": 12}, environments={name: {"use": "noop"} for name in "abcd"})
    parts = quotas(config, step, most)
    assert all(part <= most.get(name, 12) for name, part in parts.items())
    assert sum(parts.values()) == (12 if len(most) < 4 else min(12, sum(most.values())))
