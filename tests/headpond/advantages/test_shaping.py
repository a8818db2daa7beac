import numpy as np
import pytest
from support.advantages import group, recipe

from headpond.advantages import AdvantageSettings, Floats, GroupValues, group_phase, mean, resolve


def test_equal_rewards_differ_after_shaping() -> None:
    of = group([1.0, 1.0, 0.0], [10, 30, 5], [0, 0, 0], [1, 1, 1], [1, 1, 1])
    result = group_phase(of, recipe(shaping="tokens"))
    assert result.shaped.tolist() == [1.5, 1.0, 0.0]
    assert result.values.tolist() == pytest.approx([1.5 - 2.5 / 3, 1.0 - 2.5 / 3, -2.5 / 3])


@pytest.mark.parametrize("of", [[0.0, 0.0, -1.0], [-1.0, -2.0]], ids=str)
def test_without_a_positive_reward_nothing_is_shaped(of: list[float]) -> None:
    lengths = [list(range(len(of)))] * 4
    assert group_phase(group(of, *lengths), recipe(shaping="tokens")).shaped.tolist() == of


def test_empty_completions_are_not_shaped() -> None:
    of = group([1.0, 0.0], [0, 0], [0, 0], [9, 9], [1, 1])
    assert group_phase(of, recipe(shaping="tokens")).shaped.tolist() == [1.0, 0.0]


def test_a_custom_shaping_is_a_function_of_the_group() -> None:
    def linear(of: GroupValues) -> Floats:
        costs = [column / max(column.max(), 1) for column in (of.completion_tokens, of.input_tokens, of.turns)]
        return of.rewards - mean(of.rewards) * 0.1 * np.sum(costs, axis=0)

    chosen = recipe("none", shaping=linear)
    result = group_phase(group([1.0, 0.0], [10, 5], [0, 0], [4, 4], [2, 1]), chosen)
    assert result.values.tolist() == pytest.approx([1 - 0.05 * 3, -0.05 * 2])


def test_linear_shaping_lowers_rewards_by_shares_of_the_longest() -> None:
    settings = AdvantageSettings(
        estimator="none", length_shaping="linear", completion_weight=0.1, input_weight=0.1, turn_weight=0.1
    )
    of = group([1.0, 0.0], [10, 5], [0, 0], [4, 4], [2, 1])
    assert group_phase(of, resolve(settings, group_size=2)).shaped.tolist() == [1 - 0.05 * 3, -0.05 * 2]
    empty = group([1.0, 0.0], [0, 0], [0, 0], [0, 0], [0, 0])
    assert group_phase(empty, resolve(settings, group_size=2)).shaped.tolist() == [1.0, 0.0]


def test_overlong_shaping_is_the_soft_punishment_of_dapo() -> None:
    settings = AdvantageSettings(
        estimator="none", length_shaping="overlong", overlong_tokens=20, overlong_buffer=8, overlong_penalty=2.0
    )
    lengths = [0, 12, 13, 16, 20, 99]
    of = group([1.0] * 6, lengths, [0] * 6, [1] * 6, [1] * 6)
    shaped = group_phase(of, resolve(settings, group_size=6)).shaped
    assert shaped.tolist() == [1.0, 1.0, 1.0 - 2 / 8, 1.0 - 2 * 4 / 8, -1.0, -1.0]


def test_overlong_shaping_without_its_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="overlong_tokens above overlong_buffer"):
        AdvantageSettings(length_shaping="overlong")
