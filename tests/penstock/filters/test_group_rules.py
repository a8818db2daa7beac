import pytest
from support.filtering import group

from penstock.filters import Difficulty, FilterSettings, Mode, Verdict, group_filters, judge_group


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
