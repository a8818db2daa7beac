"""Draws without generator state, and the distributions."""

import statistics

import pytest

from headpond.demo.scripted_engine.draws import Distribution, Draws
from headpond.errors import ConfigError


def test_a_draw_depends_only_on_its_name_and_the_seed() -> None:
    one, again, other = Draws(b"a", b"b"), Draws(b"a", b"b"), Draws(b"ab", b"")
    assert again.uniform("y") == one.uniform("y")
    assert again.integer("x", 1, 6) == one.integer("x", 1, 6)
    assert one.uniform("x") != one.uniform("y")
    assert one.uniform("x") != other.uniform("x")


def test_draws_are_spread_evenly() -> None:
    shares = [Draws(b"%d" % seed).uniform("x") for seed in range(4000)]
    assert 0 < min(shares) < 0.01 < 0.99 < max(shares) < 1
    assert statistics.fmean(shares) == pytest.approx(0.5, abs=0.02)
    assert {Draws(b"%d" % seed).integer("x", 1, 6) for seed in range(100)} == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("constant:0.25", [0.25, 0.25, 0.25]),
        ("uniform:1:3", [1.5, 2.0, 2.5]),
        ("lognormal:100:0.5", [71.37, 100.0, 140.1]),
        ("lognormal:100:0", [100.0, 100.0, 100.0]),
    ],
)
def test_quartiles_of_each_distribution(text: str, values: list[float]) -> None:
    distribution = Distribution.parse(text)
    assert [distribution.at(share) for share in (0.25, 0.5, 0.75)] == pytest.approx(values, rel=1e-3)


@pytest.mark.parametrize(
    "text", ["", "0.5", "normal:1:2", "constant", "uniform:1", "constant:-1", "constant:nan", "constant:inf"]
)
def test_an_invalid_distribution_is_refused_with_the_syntax(text: str) -> None:
    with pytest.raises(ConfigError, match="lognormal:MEDIAN:SIGMA"):
        Distribution.parse(text)
