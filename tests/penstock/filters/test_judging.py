import math
from typing import Any

import pytest
from pydantic import ValidationError
from support.filtering import group, rollout

from penstock.errors import ConfigError
from penstock.filters import (
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


def test_custom_filters_are_found_by_name_in_the_registry() -> None:
    chosen = FilterSettings(custom={"short": Mode.DROP}, custom_groups={"rich": Mode.MASK})
    registry = {"short": lambda tokens: 0 if len(tokens.input_ids) < 2 else None, "other": lambda tokens: 0}
    filters = rollout_filters(chosen, vocab_size=VOCAB, custom=registry)
    assert judge(rollout([-1.0]), filters).drop_reason == "short"
    assert judge(rollout([-1.0, -1.0]), filters) == Verdict()
    groups = group_filters(chosen, needs_variance=True, custom={"rich": lambda each: bool(each.rewards.max() > 9)})
    assert judge_group(group([1.0, 10.0]), groups).masked
    with pytest.raises(ConfigError, match=r"filters.custom = 'short' is not known here; did you mean 'shirt'\?"):
        rollout_filters(chosen, vocab_size=VOCAB, custom={"shirt": registry["short"]})


def test_a_filter_that_is_off_does_not_run() -> None:
    chosen = FilterSettings(custom={"broken": Mode.OFF}, gibberish=Gibberish(mode=Mode.OFF))
    names = [each.name for each in rollout_filters(chosen, vocab_size=0, custom={"broken": lambda _: 1 // 0})]
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
        (lambda: FilterSettings(custom={"stale": Mode.DROP}), "stale names two filters"),
    ],
)
def test_a_wrong_setting_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make()


def test_the_gibberish_filter_needs_the_vocabulary_size() -> None:
    with pytest.raises(ConfigError, match="needs the model's vocab_size, not 0"):
        rollout_filters(FilterSettings(), vocab_size=0)
