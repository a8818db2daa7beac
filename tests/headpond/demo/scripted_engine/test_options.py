"""Settings of an engine, and the errors for wrong ones."""

import pytest

from headpond.demo.scripted_engine.options import ExpertShape, FailureRates
from headpond.errors import ConfigError


def test_failure_rates_are_parsed_by_name() -> None:
    assert FailureRates.parse("error=0.25,hang=0.5") == FailureRates(error=0.25, hang=0.5)
    assert FailureRates.parse("") == FailureRates()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("eror=0.7", "with error, malformed, hang, disconnect"),
        ("error", "write NAME=SHARE"),
        ("error=much", "write NAME=SHARE"),
        ("error=0.7,hang=0.7", "more than 1 together"),
        ("error=-0.1", "must not be negative"),
        ("error=nan", "must not be negative"),
    ],
)
def test_invalid_failure_rates_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        FailureRates.parse(text)


@pytest.mark.parametrize("wrong", [{"layers": -1}, {"topk": 0}, {"experts": 1}, {"experts": 65537}])
def test_an_invalid_shape_of_routed_experts_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="routed experts need"):
        ExpertShape(**{"layers": 1, "topk": 1, "experts": 2, **wrong})
