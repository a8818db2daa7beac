import math
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError
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
    ZeroVariance,
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
        (lambda: Gibberish(logprob_offset=math.nan), "filters.gibberish.logprob_offset is nan"),
        (lambda: Repetition(window=0), "filters.repetition.window is 0"),
        (lambda: Repetition(prob_threshold=1.0), "filters.repetition.prob_threshold is 1.0"),
        (lambda: Stale(max_off_policy_steps=-1), "filters.stale.max_off_policy_steps is -1"),
        (lambda: Difficulty(low=1.0, high=0.0), "filters.difficulty.low is 1.0, above high = 0.0"),
        (lambda: FilterSettings(overlong=Overlong(mode="skip")), "the mode of overlong is 'skip'; set one of off"),
        (lambda: FilterSettings(custom={"stale": Mode.DROP}), "stale names two filters"),
        (lambda: rollout_filters(FilterSettings(), vocab_size=0), "needs the model's vocab_size, not 0"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_settings_can_be_part_of_a_pydantic_model() -> None:
    class Run(BaseModel):
        model_config = ConfigDict(extra="forbid")
        filters: FilterSettings = FilterSettings()

    run = Run.model_validate({"filters": {"repetition": {"mode": "drop", "window": 5}, "custom": {"mine": "mask"}}})
    assert run.filters.repetition == Repetition(mode=Mode.DROP, window=5)
    assert run.filters.custom == {"mine": Mode.MASK}
    assert run.filters.zero_variance == ZeroVariance(mode=Mode.DROP)
    with pytest.raises(ValidationError, match=r"filters\.repetition\.windw"):
        Run.model_validate({"filters": {"repetition": {"windw": 5}}})
