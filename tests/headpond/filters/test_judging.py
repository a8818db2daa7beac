import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.filtering import group, rollout

from headpond.errors import ConfigError, StageError
from headpond.filters import (
    CustomFilter,
    CustomGroupFilter,
    Difficulty,
    FilterSettings,
    Gibberish,
    Mode,
    Overlong,
    Repetition,
    Stale,
    Verdict,
    group_filters,
    judge,
    judge_group,
    rollout_filters,
)

VOCAB = 50


def test_the_first_filter_that_drops_names_the_reason() -> None:
    both = rollout([-50.0], input_ids=[49], truncated=[1], versions=(0, 9))
    chosen = FilterSettings(gibberish=Gibberish(token_id_threshold=10), overlong=Overlong(mode=Mode.DROP))
    verdict = judge(both, rollout_filters(chosen, vocab_size=VOCAB))
    assert [match.filter for match in verdict.matches] == ["gibberish", "overlong", "stale"]
    assert verdict.drop_reason == "overlong"
    assert not verdict.masked


MODULE = """
def short(tokens):
    return 0 if len(tokens.input_ids) < 2 else None

def rich(group):
    return group.rewards.max() > 9

def yes(tokens):
    return True

def broken(tokens):
    return 1 // 0

def many(tokens):
    return tokens.input_ids

def half(tokens):
    return 0.5

def behind(tokens):
    return len(tokens.input_ids)

def before(tokens):
    return -1

def scalar(tokens):
    return tokens.sample_offsets[0]

def silent(group):
    pass

def each(group):
    return group.rewards > 9
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_filters.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_filters", None)


def own(function: str, mode: Mode = Mode.DROP) -> CustomFilter:
    return CustomFilter(use=f"own_filters:{function}", mode=mode)


@pytest.mark.usefixtures("module")
def test_custom_filters_are_functions_of_a_module() -> None:
    rich = CustomGroupFilter(use="own_filters:rich", mode=Mode.MASK)
    chosen = FilterSettings(custom={"brief": own("short")}, custom_groups={"rich": rich})
    filters = rollout_filters(chosen, vocab_size=VOCAB)
    assert judge(rollout([-1.0]), filters).drop_reason == "brief"
    assert judge(rollout([-1.0, -1.0]), filters) == Verdict()
    assert judge_group(group([1.0, 10.0]), group_filters(chosen, needs_variance=True)).masked
    with pytest.raises(ConfigError, match=r"filters.custom.x.use = 'own_filters:shrt': .* did you mean 'short'\?"):
        rollout_filters(FilterSettings(custom={"x": own("shrt")}), vocab_size=VOCAB)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("function", "returned"),
    [
        ("yes", "True (bool) for 2 tokens"),
        ("many", "ndarray of shape (2,) for 2 tokens"),
        ("half", "0.5 (float) for 2 tokens"),
        ("behind", "2 (int) for 2 tokens"),
        ("before", "-1 (int) for 2 tokens"),
    ],
)
def test_a_token_filter_that_returns_no_index_is_named(function: str, returned: str) -> None:
    expected = f"the filter own_filters:{function} returned {returned}: it must return the index of a token, or None"
    with pytest.raises(StageError, match=f"^{re.escape(expected)}$"):
        judge(rollout([-1.0, -1.0]), rollout_filters(FilterSettings(custom={"x": own(function)}), vocab_size=VOCAB))


@pytest.mark.usefixtures("module")
def test_an_index_may_be_numpys_and_0_in_a_rollout_without_tokens() -> None:
    filters = rollout_filters(FilterSettings(custom={"a": own("scalar"), "b": own("short")}), vocab_size=VOCAB)
    assert [(match.filter, match.token) for match in judge(rollout([]), filters).matches] == [("a", 0), ("b", 0)]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(("function", "returned"), [("silent", "None (NoneType)"), ("each", "ndarray of shape (2,)")])
def test_a_group_filter_that_returns_no_bool_is_named(function: str, returned: str) -> None:
    chosen = FilterSettings(custom_groups={"x": CustomGroupFilter(use=f"own_filters:{function}")})
    expected = f"the filter own_filters:{function} returned {returned}: it must return True or False"
    with pytest.raises(StageError, match=f"^{re.escape(expected)}$"):
        judge_group(group([1.0, 10.0]), group_filters(chosen, needs_variance=True))


@pytest.mark.usefixtures("module")
def test_a_custom_filter_that_fails_is_named() -> None:
    with pytest.raises(StageError, match=r"own_filters:broken .*ZeroDivisionError: .*own_filters.py, line 12"):
        judge(rollout([-1.0]), rollout_filters(FilterSettings(custom={"x": own("broken")}), vocab_size=VOCAB))


def test_a_filter_that_is_off_is_not_imported() -> None:
    chosen = FilterSettings(custom={"missing": own("none", Mode.OFF)}, gibberish=Gibberish(mode=Mode.OFF))
    names = [each.name for each in rollout_filters(chosen, vocab_size=0)]
    assert names == ["repetition", "overlong", "stale"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gibberish(logprob_offset=math.nan), "logprob_offset\n.*finite number"),
        (lambda: Repetition(window=0), "window\n.*greater than 0"),
        (lambda: Repetition(prob_threshold=1.0), "prob_threshold\n.*less than 1"),
        (lambda: Stale(max_off_policy_steps=-1), "max_off_policy_steps\n.*greater than or equal to 0"),
        (lambda: Difficulty(low=1.0, high=0.0), r"low \(1.0\) is above high \(0.0\)"),
        (lambda: FilterSettings.model_validate({"overlong": {"mode": "skip"}}), "overlong.mode\n.*'off', 'monitor'"),
        (lambda: FilterSettings(custom={"stale": own("short")}), "stale names two filters"),
    ],
)
def test_a_wrong_setting_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make()


def test_the_gibberish_filter_needs_the_vocabulary_size() -> None:
    with pytest.raises(ConfigError, match="needs the model's vocab_size, not 0"):
        rollout_filters(FilterSettings(), vocab_size=0)
