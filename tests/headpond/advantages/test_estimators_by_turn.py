import math
from dataclasses import replace

import numpy as np
import pytest
from support.advantages import group, recipe

from headpond.advantages import BatchValues, Estimator, GroupValues, TurnValues, batch_phase, group_phase
from headpond.errors import StageError

NAN = math.nan


def turns(rewards: list[float], agents: str = "", tokens: list[int] | None = None) -> TurnValues:
    return TurnValues(
        rewards=np.array(rewards, np.float64),
        agents=tuple(agents) or ("",) * len(rewards),
        tokens=np.array(tokens or [1] * len(rewards), np.int64),
    )


def with_turns(rewards: list[float], *by_turn: TurnValues) -> GroupValues:
    return replace(group(rewards), by_turn=by_turn)


def test_process_supervision_normalises_all_turns_and_sums_the_later_ones() -> None:
    of = with_turns([9.0, 9.0], turns([1.0, 0.0, 2.0]), turns([0.0, 2.0]))
    spread = math.sqrt(((1 - 1) ** 2 + 1 + 1 + 1 + 1) / 4) + 1e-6  # of 1, 0, 2, 0, 2
    normal = [[0.0, -1 / spread, 1 / spread], [-1 / spread, 1 / spread]]
    result = group_phase(of, recipe("grpo_process"))
    assert result.by_turn is not None
    for values, each in zip(result.by_turn, normal, strict=True):
        np.testing.assert_allclose(values, np.cumsum(each[::-1])[::-1], rtol=1e-12, atol=1e-15)


def test_a_rollout_without_turn_rewards_has_its_reward_at_its_last_turn() -> None:
    of = with_turns([1.0, 0.0], turns([NAN, NAN]), turns([NAN]))
    result = group_phase(of, recipe("grpo_process"))
    assert result.by_turn is not None
    value = 0.5 / (math.sqrt(0.5) + 1e-6)
    np.testing.assert_allclose(result.by_turn[0], [value, value], rtol=1e-12)
    np.testing.assert_allclose(result.by_turn[1], [-value], rtol=1e-12)


def test_a_rollout_has_the_mean_of_its_turns_over_tokens() -> None:
    chosen = Estimator(group=lambda of: [each.rewards for each in of.by_turn], per_turn=True, needs_variance=False)
    of = with_turns([0.0, 0.0, 0.0], turns([1.0, 4.0], tokens=[2, 1]), turns([3.0], tokens=[0]), turns([]))
    assert group_phase(of, recipe(chosen)).values.tolist() == [2.0, 0.0, 0.0]


def test_equal_turn_rewards_leave_nothing_to_judge() -> None:
    result = group_phase(with_turns([1.0, 0.0], turns([1.0, 1.0]), turns([1.0])), recipe("grpo_process"))
    assert not result.judged.any()
    assert not result.values.any()


def test_each_agent_is_compared_with_itself() -> None:
    of = replace(
        with_turns([0.0, 0.0], turns([NAN] * 3, "wbw"), turns([NAN] * 2, "wb")),
        agent_rewards=({"w": 1.0, "b": -1.0}, {"w": 0.0, "b": 0.0}),
    )
    result = group_phase(of, recipe("grpo_agents"))
    value = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert result.by_turn is not None
    np.testing.assert_allclose(result.by_turn[0], [value, -value, value], rtol=1e-12)
    np.testing.assert_allclose(result.by_turn[1], [-value, value], rtol=1e-12)


def test_rae_subtracts_a_moving_mean_of_each_agent_in_the_order_of_the_ledger() -> None:
    by_turn = (turns([NAN] * 2, "wb"), turns([NAN] * 3, "wbw"))
    batch = BatchValues(
        values=np.zeros(2),
        sampled_tokens=np.array([2, 3]),
        by_turn=by_turn,
        turn_values=(np.array([1.0, -1.0]), np.array([0.0, 4.0, 0.0])),
        environments=("chess", "chess"),
    )
    first = batch_phase(batch, recipe("rae"))
    assert first.by_turn is not None
    w, b = 0.05 * 1.0, 0.05 * -1.0  # 0.95 * 0 + 0.05 * reward
    np.testing.assert_allclose(first.by_turn[0], [1.0, -1.0], rtol=1e-12)
    np.testing.assert_allclose(first.by_turn[1], [0.0 - w, 4.0 - b, 0.0 - w], rtol=1e-12)
    second = batch_phase(batch, recipe("rae"), first.state)
    assert second.by_turn is not None
    np.testing.assert_allclose(second.by_turn[0], [1.0 - 0.95 * w, -1.0 - (0.95 * b + 0.05 * 4.0)], rtol=1e-12)


@pytest.mark.parametrize("returned", [[[1.0]], [[1.0], [1.0, 2.0]], [[1.0, NAN], [1.0]]], ids=str)
def test_values_that_do_not_fit_the_turns_are_refused(returned: list[list[float]]) -> None:
    chosen = Estimator(group=lambda _: [np.array(each) for each in returned], per_turn=True, needs_variance=False)
    with pytest.raises(StageError, match="mine gave"):
        group_phase(with_turns([0.0, 1.0], turns([NAN, NAN]), turns([NAN])), recipe(chosen))
