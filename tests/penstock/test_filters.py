import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import ConfigError, StageError
from penstock.filters import (
    Difficulty,
    FilterSettings,
    Gibberish,
    GroupRewards,
    Mode,
    Overlong,
    Repetition,
    RolloutTokens,
    Stale,
    Verdict,
    ZeroVariance,
    count,
    group_filters,
    is_stale,
    judge,
    judge_group,
    rollout_filters,
)

VOCAB = 50
LIMITS = [math.log(0.99), -math.log(VOCAB) - 2.0]
NEAR_LIMITS = [np.nextafter(np.float32(x), np.float32(way)) for x in LIMITS for way in (x, -np.inf, np.inf)]
LOGPROBS = [*map(float, NEAR_LIMITS), *map(float, map(np.float32, LIMITS)), 0.0, -0.001, -1.0, -50.0, math.nan]


def rollout(
    logprobs: list[float],
    *,
    input_ids: list[int] | None = None,
    loss_mask: list[int] | None = None,
    sample_offsets: list[int] | None = None,
    truncated: list[int] | None = None,
    overlong_prompt: list[int] | None = None,
    versions: tuple[int, int] = (0, 0),
) -> RolloutTokens:
    offsets = [0, len(logprobs)] if sample_offsets is None else sample_offsets
    samples = len(offsets) - 1
    return RolloutTokens(
        input_ids=np.array([7] * len(logprobs) if input_ids is None else input_ids, np.int32),
        loss_mask=np.array([1] * len(logprobs) if loss_mask is None else loss_mask, np.uint8),
        logprobs=np.array(logprobs, np.float32),
        sample_offsets=np.array(offsets, np.int64),
        truncated=np.array([0] * samples if truncated is None else truncated, np.uint8),
        overlong_prompt=np.array([0] * samples if overlong_prompt is None else overlong_prompt, np.uint8),
        version_first=versions[0],
        version_now=versions[1],
    )


NOTHING = rollout([], sample_offsets=[0])
EMPTY_COMPLETION = rollout([0.0, 0.0], loss_mask=[0, 0])


@st.composite
def rollouts(draw: st.DrawFn) -> RolloutTokens:
    lengths = draw(st.lists(st.integers(0, 12), max_size=4))
    tokens, flags = sum(lengths), st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths))

    def column(values: list[Any]) -> list[Any]:
        return draw(st.lists(st.sampled_from(values), min_size=tokens, max_size=tokens))

    return rollout(
        column(LOGPROBS),
        input_ids=column([0, 9, 10, 11, 49]),
        loss_mask=column([0, 1, 1, 1]),
        sample_offsets=[0, *np.cumsum(lengths, dtype=int).tolist()],
        truncated=draw(flags),
        overlong_prompt=draw(flags),
        versions=(draw(st.integers(-1, 4)), draw(st.integers(0, 8))),
    )


def expected_tokens(tokens: RolloutTokens, chosen: FilterSettings) -> dict[str, int | None]:
    """Every rule once more, as a loop over Python numbers."""
    found: dict[str, int | None] = dict.fromkeys(["gibberish", "repetition", "overlong", "stale"])
    first_sampled = None
    offsets = tokens.sample_offsets.tolist()
    for sample, (start, end) in enumerate(pairwise(offsets)):
        run = 0
        for token in range(start, end):
            if not tokens.loss_mask[token]:
                continue
            first_sampled = token if first_sampled is None else first_sampled
            logprob = float(tokens.logprobs[token])
            rare = int(tokens.input_ids[token]) > chosen.gibberish.token_id_threshold
            unlikely = logprob < -math.log(VOCAB) - chosen.gibberish.logprob_offset
            if rare and unlikely and found["gibberish"] is None:
                found["gibberish"] = token
            run = run + 1 if logprob > math.log(chosen.repetition.prob_threshold) else 0
            if run >= chosen.repetition.window and found["repetition"] is None:
                found["repetition"] = token
        if (tokens.truncated[sample] or tokens.overlong_prompt[sample]) and found["overlong"] is None:
            found["overlong"] = max(end - 1, 0)
    if tokens.version_first >= 0 and tokens.version_now - tokens.version_first > chosen.stale.max_off_policy_steps:
        found["stale"] = first_sampled or 0
    return found


@st.composite
def chosen_settings(draw: st.DrawFn) -> FilterSettings:
    modes = st.sampled_from(Mode)
    return FilterSettings(
        gibberish=Gibberish(mode=draw(modes), token_id_threshold=10),
        repetition=Repetition(mode=draw(modes), window=draw(st.integers(1, 9))),
        overlong=Overlong(mode=draw(modes)),
        stale=Stale(mode=draw(modes), max_off_policy_steps=2),
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(batch=st.lists(rollouts(), max_size=4), chosen=chosen_settings())
def test_verdicts_tokens_and_counts_equal_those_of_plain_loops(
    batch: list[RolloutTokens], chosen: FilterSettings
) -> None:
    filters = rollout_filters(chosen, vocab_size=VOCAB)
    modes: dict[str, Mode] = {name: getattr(chosen, name).mode for name in expected_tokens(NOTHING, chosen)}
    matched, dropped, masked = Counter[str](), Counter[str](), 0
    verdicts = [judge(tokens, filters) for tokens in batch]
    for tokens, verdict in zip(batch, verdicts, strict=True):
        expected = [
            (name, modes[name], token)
            for name, token in expected_tokens(tokens, chosen).items()
            if token is not None and modes[name] != "off"
        ]
        assert [(match.filter, match.mode, match.token) for match in verdict.matches] == expected
        reasons = [name for name, mode, _ in expected if mode == "drop"]
        assert verdict.drop_reason == (reasons[0] if reasons else None)
        matched.update(name for name, _, _ in expected)
        dropped.update(reasons[:1])
        masked += not reasons and any(mode == "mask" for _, mode, _ in expected)
    counts = count(verdicts)
    assert (counts.matched, counts.dropped, counts.masked) == (matched, dropped, masked)


def tokens_found(tokens: RolloutTokens, chosen: FilterSettings) -> dict[str, int | None]:
    matches = judge(tokens, rollout_filters(chosen, vocab_size=VOCAB)).matches
    return {match.filter: match.token for match in matches}


def test_gibberish_is_a_rare_token_that_was_sampled_against_the_odds() -> None:
    chosen = FilterSettings(gibberish=Gibberish(token_id_threshold=10))
    unlikely = [-50.0] * 4
    assert tokens_found(rollout(unlikely, input_ids=[10, 11, 11, 11], loss_mask=[1, 0, 1, 1]), chosen) == {
        "gibberish": 2
    }
    assert tokens_found(rollout([-1.0] * 4, input_ids=[11] * 4), chosen) == {}


def test_a_run_goes_on_over_context_and_ends_with_its_sample() -> None:
    chosen = FilterSettings(repetition=Repetition(window=3))
    certain = [-0.001] * 6
    assert tokens_found(rollout(certain, loss_mask=[1, 1, 0, 0, 0, 1]), chosen) == {"repetition": 5}
    assert tokens_found(rollout(certain, loss_mask=[0, 0, 0, 0, 1, 1]), chosen) == {}
    assert tokens_found(rollout(certain, sample_offsets=[0, 2, 4, 6]), chosen) == {}


@pytest.mark.parametrize("window", range(1, 10))
def test_a_run_of_exactly_the_window_is_found_wherever_it_lies(window: int) -> None:
    chosen = FilterSettings(repetition=Repetition(window=window))
    for start in range(30 - window):
        logprobs = [-1.0] * 30
        logprobs[start : start + window] = [-0.001] * window
        assert tokens_found(rollout(logprobs), chosen) == {"repetition": start + window - 1}
        logprobs[start] = -1.0
        assert tokens_found(rollout(logprobs), chosen) == {}


@pytest.mark.parametrize("flags", [{"truncated": [0, 1]}, {"overlong_prompt": [0, 1]}], ids=str)
def test_overlong_is_seen_at_the_last_token_before_the_cut(flags: Mapping[str, list[int]]) -> None:
    assert tokens_found(rollout([-1.0] * 5, sample_offsets=[0, 2, 5], **flags), FilterSettings()) == {"overlong": 4}


def test_staleness_is_seen_at_the_first_sampled_token_and_can_be_asked_of_versions_alone() -> None:
    old = rollout([0.0, -1.0], loss_mask=[0, 1], versions=(3, 12))
    assert tokens_found(old, FilterSettings()) == {"stale": 1}
    assert tokens_found(rollout([-1.0], versions=(3, 11)), FilterSettings()) == {}
    assert is_stale(version_first=3, version_now=12, max_off_policy_steps=8)
    assert not is_stale(version_first=-1, version_now=12, max_off_policy_steps=8)


@pytest.mark.parametrize("tokens", [NOTHING, EMPTY_COMPLETION], ids=["zero samples", "empty completion"])
def test_a_rollout_without_sampled_tokens_matches_no_filter_over_tokens(tokens: RolloutTokens) -> None:
    chosen = FilterSettings(gibberish=Gibberish(token_id_threshold=0), repetition=Repetition(window=1))
    assert judge(tokens, rollout_filters(chosen, vocab_size=VOCAB)) == Verdict()


def test_a_monitoring_filter_shields_from_nothing_and_the_first_drop_names_the_reason() -> None:
    both = rollout([-50.0], input_ids=[49], truncated=[1], versions=(0, 9))
    chosen = FilterSettings(gibberish=Gibberish(token_id_threshold=10), overlong=Overlong(mode=Mode.DROP))
    verdict = judge(both, rollout_filters(chosen, vocab_size=VOCAB))
    assert [match.filter for match in verdict.matches] == ["gibberish", "overlong", "stale"]
    assert verdict.drop_reason == "overlong"
    assert not verdict.masked


def group(rewards: list[float], shaped: list[float] | None = None) -> GroupRewards:
    return GroupRewards(rewards=np.array(rewards), shaped=np.array(rewards if shaped is None else shaped))


@pytest.mark.parametrize(
    ("shaped", "equal"),
    [
        ([0.1, 0.1, 0.1], True),
        ([1.0, 1.0 + 1e-10], True),
        ([1.0, 1.0 + 1e-8], False),
        ([1e6, 1e6 + 1e-4], True),
        ([-1e6, -1e6 + 1e-4], True),
        ([0.0, 1e-10], True),
        ([0.0, 1e-8], False),
        ([5.0], True),
    ],
)
def test_zero_variance_is_judged_on_shaped_rewards(shaped: list[float], equal: bool) -> None:
    filters = group_filters(FilterSettings(), needs_variance=True)
    verdict = judge_group(group([0.0] * len(shaped), shaped), filters)
    assert verdict.drop_reason == ("zero_variance" if equal else None)


def test_zero_variance_waits_for_an_estimator_that_needs_variance() -> None:
    assert judge_group(group([1.0, 1.0]), group_filters(FilterSettings(), needs_variance=False)) == Verdict()


def test_difficulty_is_judged_on_mean_rewards_before_shaping() -> None:
    chosen = FilterSettings(difficulty=Difficulty(mode=Mode.MASK, low=0.25, high=0.75))
    filters = group_filters(chosen, needs_variance=True)
    assert judge_group(group([0.0, 1.0], shaped=[0.0, 9.0]), filters) == Verdict()
    assert judge_group(group([0.0, 0.1]), filters).masked
    assert judge_group(group([0.9, 1.0]), filters).masked


def test_a_groups_verdict_follows_its_rollouts_own() -> None:
    own = judge(rollout([-1.0], versions=(0, 9)), rollout_filters(FilterSettings(), vocab_size=VOCAB))
    groups = judge_group(group([1.0, 1.0]), group_filters(FilterSettings(), needs_variance=True))
    assert (own + groups).drop_reason == "stale"
    assert (Verdict() + groups).drop_reason == "zero_variance"
    assert count([own + groups, groups]).matched == {"stale": 1, "zero_variance": 2}


def test_custom_filters_are_functions_found_by_name_in_the_processs_own_registry() -> None:
    chosen = FilterSettings(custom={"short": Mode.DROP}, custom_groups={"rich": Mode.MASK})
    registry = {"short": lambda tokens: 0 if len(tokens.input_ids) < 2 else None, "other": lambda tokens: 0}
    filters = rollout_filters(chosen, vocab_size=VOCAB, custom=registry)
    assert judge(rollout([-1.0]), filters).drop_reason == "short"
    assert judge(rollout([-1.0, -1.0]), filters) == Verdict()
    groups = group_filters(chosen, needs_variance=True, custom={"rich": lambda each: bool(each.rewards.max() > 9)})
    assert judge_group(group([1.0, 10.0]), groups).masked
    with pytest.raises(ConfigError, match=r"filters.custom = 'short' is not known here; did you mean 'shirt'\?"):
        rollout_filters(chosen, vocab_size=VOCAB, custom={"shirt": registry["short"]})


def test_a_filter_that_is_off_is_not_asked() -> None:
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
        (lambda: FilterSettings(overlong=Overlong(mode="skip")), "the mode of overlong is 'skip'; choose one of off"),
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss_mask": [1]},
        {"input_ids": [1]},
        {"sample_offsets": [0, 1], "truncated": [0]},
        {"sample_offsets": [1, 2], "truncated": [0]},
        {"sample_offsets": [], "truncated": []},
        {"truncated": [0, 0]},
        {"overlong_prompt": []},
    ],
    ids=str,
)
def test_arrays_that_disagree_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(StageError, match="a rollout's arrays disagree"):
        rollout([-1.0, -1.0], **wrong)
