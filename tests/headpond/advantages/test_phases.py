import json
import math

import numpy as np
import pytest
from support.advantages import group, recipe, values

from headpond.advantages import (
    ESTIMATORS,
    BatchValues,
    Estimator,
    Floats,
    GroupValues,
    batch_phase,
    deviation,
    group_phase,
    mean,
    reward_error,
)
from headpond.advantages.phases import STATE_LIMIT_BYTES
from headpond.errors import StageError
from headpond.filters import FilterSettings, GroupRewards, group_filters, judge_group


@pytest.mark.parametrize("estimator", [name for name, each in ESTIMATORS.items() if each.batch is None])
def test_without_a_batch_phase_values_are_delivered_as_float32(estimator: str) -> None:
    assert not recipe(estimator).has_batch_phase
    delivered = batch_phase(
        BatchValues(values=np.array([0.1, -2.0]), sampled_tokens=np.array([3, 0])), recipe(estimator)
    ).values
    assert delivered.dtype == np.float32
    assert delivered.tolist() == [np.float32(0.1), -2.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_are_equal_although_their_mean_is_rounded(estimator: str) -> None:
    chosen = recipe(estimator, group_size=3)
    result = group_phase(group([0.1, 0.1, 0.1]), chosen)
    filters = group_filters(FilterSettings(), needs_variance=chosen.needs_variance)
    judged = GroupRewards(rewards=np.full(3, 0.1), shaped=result.shaped, judged=result.judged)
    verdict = judge_group(judged, filters)
    if not ESTIMATORS[estimator].needs_variance:
        assert (result.values.tolist(), verdict.drop_reason) == ([0.1, 0.1, 0.1], None)
    else:
        assert (result.values.tolist(), verdict.drop_reason) == ([0.0, 0.0, 0.0], "zero_variance")


def test_a_dropped_rollouts_reward_stays_in_the_baseline() -> None:
    rewards, kept = [1.0, 0.0, 0.0, 0.0], [0, 1, 2]
    result = group_phase(group(rewards), recipe("dr_grpo", group_size=4))
    assert result.values[kept].tolist() == [0.75, -0.25, -0.25]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_of_one_needs_a_group_size_of_one(estimator: str) -> None:
    alone = recipe(estimator, group_size=1)
    assert group_phase(group([0.75]), alone).values.tolist() == [0.75]
    assert not alone.needs_variance
    with pytest.raises(StageError, match=r"one rollout of 8 has no baseline"):
        group_phase(group([0.75]), recipe(estimator, group_size=8))


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e31])
def test_a_reward_that_is_not_finite_is_an_error_of_its_rollout(reward: float) -> None:
    scored = {"r1": 1.0, "r2": reward, "r3": 0.0}
    failed = {name: error for name, each in scored.items() if (error := reward_error(each, recipe()))}
    assert list(failed) == ["r2"]
    assert f"its reward is {reward}" in failed["r2"]
    rest = [each for name, each in scored.items() if name not in failed]
    assert values("dr_grpo", rest).tolist() == [0.5, -0.5]
    with pytest.raises(StageError, match=r"rollout 1 .*reward is"):
        values("dr_grpo", list(scored.values()))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_largest_rewards_stay_finite_as_float32(estimator: str) -> None:
    chosen = recipe(estimator)
    lowest = max(-1e30, chosen.estimator.min_reward)
    of = group([1e30, lowest, lowest])
    result = group_phase(of, chosen)
    batch = BatchValues(
        values=result.values,
        sampled_tokens=np.array([5, 0, 1]),
        by_turn=of.by_turn,
        turn_values=result.by_turn or (),
        environments=("",) * 3,
    )
    assert np.isfinite(batch_phase(batch, chosen).values).all()


def gdpo_group(of: GroupValues) -> Floats:
    weighted = [(weight, of.named_rewards[name]) for name, weight in {"right": 1.0, "short": 0.5}.items()]
    return np.sum([weight * (part - mean(part)) / deviation(part) for weight, part in weighted], axis=0)


def gdpo_batch(batch: BatchValues) -> Floats:
    return (batch.values - mean(batch.values)) / deviation(batch.values)


def test_a_custom_estimator_can_use_named_rewards_and_both_phases() -> None:
    chosen = recipe(Estimator(group=gdpo_group, batch=gdpo_batch))
    assert chosen.has_batch_phase
    of = group([1.0, 0.0], named={"right": [1.0, 0.0], "short": [0.0, 1.0]})
    result = group_phase(of, chosen)
    assert result.values.tolist() == pytest.approx([math.sqrt(0.125), -math.sqrt(0.125)])
    delivered = batch_phase(BatchValues(values=result.values, sampled_tokens=np.array([4, 9])), chosen).values
    assert delivered.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


def per_agent(batch: BatchValues, baselines: dict[str, float]) -> tuple[Floats, dict[str, float]]:
    values = batch.values.copy()
    for index, agent in enumerate(next(iter(agents)) for agents in batch.agents):
        values[index] -= baselines.get(agent, 0.0)
        baselines[agent] = 0.5 * baselines.get(agent, 0.0) + 0.5 * batch.values[index]
    return values, baselines


RAE = Estimator(group=lambda of: of.rewards, batch=per_agent, needs_variance=False, state={"white": 0.5})


def played_by(*agents: str) -> BatchValues:
    count = len(agents)
    return BatchValues(
        values=np.ones(count), sampled_tokens=np.ones(count, np.int64), agents=tuple({agent: 1} for agent in agents)
    )


def test_a_custom_estimator_can_keep_a_baseline_per_agent() -> None:
    first = batch_phase(played_by("white", "black", "white"), recipe(RAE))
    assert first.values.tolist() == [0.5, 1.0, 0.25]
    second = batch_phase(played_by("black"), recipe(RAE), first.state)
    assert second.values.tolist() == [0.5]
    assert json.loads(second.state or "")["state"] == {"white": 0.875, "black": 0.75}
    assert batch_phase(played_by("white"), recipe(RAE)).values.tolist() == [0.5], "the first state is not changed"


def test_the_state_of_another_estimator_is_not_used() -> None:
    other = batch_phase(played_by("white"), recipe(RAE, name="other")).state
    assert batch_phase(played_by("white"), recipe(RAE), other).values.tolist() == [0.5]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {1, 2}}, "returned a state that is not JSON-serializable: it contains a set"),
        ({"a": math.nan}, "returned a state that is not JSON-serializable"),
        ("x" * STATE_LIMIT_BYTES, "returned a state of 1048610 bytes: the limit is 1048576"),
    ],
    ids=["set", "nan", "large"],
)
def test_a_state_that_cannot_be_kept_is_refused(state: object, message: str) -> None:
    chosen = recipe(Estimator(group=lambda of: of.rewards, batch=lambda batch, _: (batch.values, state), state={}))
    with pytest.raises(StageError, match=message):
        batch_phase(played_by("white"), chosen)


def test_a_batch_phase_with_a_state_must_return_a_pair() -> None:
    chosen = recipe(Estimator(group=lambda of: of.rewards, batch=lambda batch, _: batch.values, state={}))  # type: ignore[arg-type]
    with pytest.raises(StageError, match=r"mine .*shape \(1,\).* \(advantages, next state\)"):
        batch_phase(played_by("white"), chosen)


def test_an_error_of_an_estimator_names_its_file_and_line() -> None:
    chosen = recipe(Estimator(group=lambda of: of.rewards / {}["missing"]))  # type: ignore[typeddict-item]
    with pytest.raises(StageError, match=r"mine .*group phase.* KeyError: 'missing' .*test_phases.py, line"):
        group_phase(group([1.0, 0.0]), chosen)


@pytest.mark.parametrize("wrong", [[1.0], [math.nan, 0.0], [1e39, 0.0]], ids=str)
def test_an_estimator_with_an_invalid_result_is_named(wrong: list[float]) -> None:
    chosen = recipe(Estimator(group=lambda _: np.array(wrong)))
    with pytest.raises(StageError, match=r"mine gave .* for 2 rollouts"):
        group_phase(group([1.0, 0.0]), chosen)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(StageError, match="a group of 2 rewards has columns of"):
        group([1.0, 0.0], [1], [1, 1], [1, 1], [1, 1])
    with pytest.raises(StageError, match="a group of 0 rewards"):
        group([])
    with pytest.raises(StageError, match=r"2 values .*\[1\]"):
        BatchValues(values=np.zeros(2), sampled_tokens=np.zeros(1, np.int64))
