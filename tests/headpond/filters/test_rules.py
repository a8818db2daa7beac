import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.filtering import group, rollout

from headpond.errors import StageError
from headpond.filters import (
    Difficulty,
    FilterSettings,
    Gibberish,
    Mode,
    Overlong,
    Repetition,
    RolloutTokens,
    Stale,
    Verdict,
    count_matches,
    group_filters,
    is_stale,
    judge,
    judge_group,
    rollout_filters,
)

VOCAB = 50
LIMITS = [math.log(0.99), -math.log(VOCAB) - 2.0]
NEAR_LIMITS = [np.nextafter(np.float32(x), np.float32(towards)) for x in LIMITS for towards in (x, -np.inf, np.inf)]
LOGPROBS = [*map(float, NEAR_LIMITS), *map(float, map(np.float32, LIMITS)), 0.0, -0.001, -1.0, -50.0, math.nan]
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
    """Reference implementation of every rule: a loop over Python numbers."""
    matched: dict[str, int | None] = dict.fromkeys(["gibberish", "repetition", "overlong", "stale"])
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
            if rare and unlikely and matched["gibberish"] is None:
                matched["gibberish"] = token
            run = run + 1 if logprob > math.log(chosen.repetition.prob_threshold) else 0
            if run >= chosen.repetition.window and matched["repetition"] is None:
                matched["repetition"] = token
        if (tokens.truncated[sample] or tokens.overlong_prompt[sample]) and matched["overlong"] is None:
            matched["overlong"] = max(end - 1, 0)
    if tokens.version_first >= 0 and tokens.version_now - tokens.version_first > chosen.stale.max_off_policy_steps:
        matched["stale"] = first_sampled or 0
    return matched


@st.composite
def chosen_settings(draw: st.DrawFn) -> FilterSettings:
    modes = st.sampled_from(Mode)
    return FilterSettings(
        gibberish=Gibberish(mode=draw(modes), token_id_threshold=10),
        repetition=Repetition(mode=draw(modes), window=draw(st.integers(1, 9))),
        overlong=Overlong(mode=draw(modes)),
        stale=Stale(mode=draw(modes), max_off_policy_steps=2),
    )


@settings(max_examples=200)
@given(batch=st.lists(rollouts(), max_size=4), chosen=chosen_settings())
def test_verdicts_tokens_and_counts_equal_those_of_plain_loops(
    batch: list[RolloutTokens], chosen: FilterSettings
) -> None:
    filters = rollout_filters(chosen, vocab_size=VOCAB)
    modes: dict[str, Mode] = {name: getattr(chosen, name).mode for name in expected_tokens(NOTHING, chosen)}
    matched = Counter[str]()
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
        assert verdict.masked == (not reasons and any(mode == "mask" for _, mode, _ in expected))
        matched.update(name for name, _, _ in expected)
    assert count_matches(verdicts) == matched


def matched_tokens(tokens: RolloutTokens, chosen: FilterSettings) -> dict[str, int | None]:
    matches = judge(tokens, rollout_filters(chosen, vocab_size=VOCAB)).matches
    return {match.filter: match.token for match in matches}


def test_gibberish_is_a_rare_token_with_a_low_probability() -> None:
    chosen = FilterSettings(gibberish=Gibberish(token_id_threshold=10))
    unlikely = [-50.0] * 4
    assert matched_tokens(rollout(unlikely, input_ids=[10, 11, 11, 11], loss_mask=[1, 0, 1, 1]), chosen) == {
        "gibberish": 2
    }
    assert matched_tokens(rollout([-1.0] * 4, input_ids=[11] * 4), chosen) == {}


def test_a_run_continues_over_context_and_ends_with_its_sample() -> None:
    chosen = FilterSettings(repetition=Repetition(window=3))
    certain = [-0.001] * 6
    assert matched_tokens(rollout(certain, loss_mask=[1, 1, 0, 0, 0, 1]), chosen) == {"repetition": 5}
    assert matched_tokens(rollout(certain, loss_mask=[0, 0, 0, 0, 1, 1]), chosen) == {}
    assert matched_tokens(rollout(certain, sample_offsets=[0, 2, 4, 6]), chosen) == {}


@pytest.mark.parametrize("window", range(1, 10))
def test_a_run_of_exactly_the_window_is_found_at_every_position(window: int) -> None:
    chosen = FilterSettings(repetition=Repetition(window=window))
    for start in range(30 - window):
        logprobs = [-1.0] * 30
        logprobs[start : start + window] = [-0.001] * window
        assert matched_tokens(rollout(logprobs), chosen) == {"repetition": start + window - 1}
        logprobs[start] = -1.0
        assert matched_tokens(rollout(logprobs), chosen) == {}


@pytest.mark.parametrize("flags", [{"truncated": [0, 1]}, {"overlong_prompt": [0, 1]}], ids=str)
def test_overlong_matches_at_the_last_token_before_the_cut(flags: Mapping[str, list[int]]) -> None:
    assert matched_tokens(rollout([-1.0] * 5, sample_offsets=[0, 2, 5], **flags), FilterSettings()) == {"overlong": 4}


@pytest.mark.parametrize(
    ("reason", "matched"),
    [("length", {"overlong": 4}), ("repetition", {"repetition": 4}), ("stop", {}), ("tool_calls", {}), ("", {})],
)
def test_the_last_turns_finish_reason_decides_too(reason: str, matched: dict[str, int]) -> None:
    tokens = dataclasses.replace(rollout([-1.0] * 5, sample_offsets=[0, 2, 5]), finish_reason=reason)
    assert matched_tokens(tokens, FilterSettings()) == matched


def test_stale_matches_at_the_first_sampled_token() -> None:
    old = rollout([0.0, -1.0], loss_mask=[0, 1], versions=(3, 12))
    assert matched_tokens(old, FilterSettings()) == {"stale": 1}
    assert matched_tokens(rollout([-1.0], versions=(3, 11)), FilterSettings()) == {}
    assert is_stale(version_first=3, version_now=12, max_off_policy_steps=8)
    assert not is_stale(version_first=-1, version_now=12, max_off_policy_steps=8)


@pytest.mark.parametrize("tokens", [NOTHING, EMPTY_COMPLETION], ids=["zero samples", "empty completion"])
def test_a_rollout_without_sampled_tokens_matches_no_token_filter(tokens: RolloutTokens) -> None:
    chosen = FilterSettings(gibberish=Gibberish(token_id_threshold=0), repetition=Repetition(window=1))
    assert judge(tokens, rollout_filters(chosen, vocab_size=VOCAB)) == Verdict()


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
def test_columns_of_different_lengths_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(StageError, match="a rollout's columns have different lengths"):
        rollout([-1.0, -1.0], **wrong)


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


def test_zero_variance_applies_only_to_estimators_that_need_variance() -> None:
    assert judge_group(group([1.0, 1.0]), group_filters(FilterSettings(), needs_variance=False)) == Verdict()


def test_difficulty_is_judged_on_mean_rewards_before_shaping() -> None:
    chosen = FilterSettings(difficulty=Difficulty(mode=Mode.MASK, low=0.25, high=0.75))
    filters = group_filters(chosen, needs_variance=True)
    assert judge_group(group([0.0, 1.0], shaped=[0.0, 9.0]), filters) == Verdict()
    assert judge_group(group([0.0, 0.1]), filters).masked
    assert judge_group(group([0.9, 1.0]), filters).masked
