import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.advantages import (
    ESTIMATORS,
    AdvantageSettings,
    BatchValues,
    Estimator,
    Floats,
    GroupValues,
    Recipe,
    batch_phase,
    deviation,
    group_phase,
    mean,
    resolve,
    reward_error,
)
from penstock.errors import ConfigError, StageError
from penstock.filters import FilterSettings, GroupRewards, group_filters, judge_group

VECTORS = Path(__file__).parents[1] / "vectors" / "advantages.jsonl"
BY_NAME = ["grpo", "dr_grpo", "rloo", "pass_at_k_normalised", "reinforce_pp", "reinforce_pp_baseline"]
IN_VECTORS = {name: AdvantageSettings(estimator=name) for name in BY_NAME} | {
    "dr_grpo_length_turns": AdvantageSettings(length_shaping="turns"),
    "dr_grpo_length_tokens": AdvantageSettings(length_shaping="tokens"),
}
WITHOUT_VARIANCE = {"reinforce_pp", "none"}

thorough = settings(max_examples=50, deadline=None, derandomize=True)
rewards = st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.integers(-1000, 1000).map(lambda i: i / 128))
sizes = st.integers(0, 40)


@st.composite
def groups(draw: st.DrawFn) -> GroupValues:
    rows = draw(st.lists(st.tuples(rewards, sizes, sizes, sizes, sizes), min_size=2, max_size=8))
    given_rewards, *columns = zip(*rows, strict=True)
    return group(list(given_rewards), *columns)


def allowed(of: GroupValues, estimator: str) -> GroupValues:
    """The same with rewards that the estimator takes."""
    return replace(of, rewards=np.maximum(of.rewards, ESTIMATORS[estimator].min_reward))


def group(rewards: list[float], *columns: Any, named: dict[str, list[float]] | None = None) -> GroupValues:
    completion, tool, inputs, turns = columns or [[1] * len(rewards)] * 4
    return GroupValues(
        rewards=np.array(rewards, np.float64),
        completion_tokens=np.array(completion, np.int64),
        tool_tokens=np.array(tool, np.int64),
        input_tokens=np.array(inputs, np.int64),
        turns=np.array(turns, np.int64),
        named_rewards={name: np.array(values) for name, values in (named or {}).items()},
    )


def recipe(estimator: str = "dr_grpo", *, group_size: int = 8, shaping: str = "none", **custom: Any) -> Recipe:
    return resolve(
        AdvantageSettings(estimator=estimator, length_shaping=shaping, completion_weight=1.0, tool_weight=0.5),
        group_size=group_size,
        **custom,
    )


def values(estimator: str, of: GroupValues | list[float]) -> Floats:
    return group_phase(of if isinstance(of, GroupValues) else group(of), recipe(estimator)).values


@pytest.mark.parametrize("name", IN_VECTORS)
def test_other_systems_own_code_gives_the_same_numbers(name: str) -> None:
    chosen = resolve(IN_VECTORS[name], group_size=8)
    for case in map(json.loads, VECTORS.read_text().splitlines()):
        parts: list[Floats] = []
        for row in case["groups"]:
            zeros = [0] * len(row["rewards"])
            of = group(row["rewards"], row["completion_tokens"], zeros, zeros, row["turns"])
            parts.append(group_phase(of, chosen).values)
        tokens = np.array([count for row in case["groups"] for count in row["completion_tokens"]])
        advantages = batch_phase(BatchValues(values=np.concatenate(parts), sampled_tokens=tokens), chosen)
        all_rewards = np.array([reward for row in case["groups"] for reward in row["rewards"]])
        tolerance = 1e-4 if np.ptp(all_rewards) < 1e-6 else 2e-7  # two float32 steps at 1
        expected = np.concatenate(case["expected"][name])
        np.testing.assert_allclose(advantages, expected, rtol=tolerance, atol=tolerance)


def exact_mean(of: list[Fraction]) -> Fraction:
    return sum(of, Fraction()) / len(of)


def exact_variance(of: list[Fraction]) -> Fraction:
    middle = exact_mean(of)
    return sum(((x - middle) ** 2 for x in of), Fraction()) / (len(of) - 1)


def exact_lead(r: list[Fraction]) -> list[Fraction]:
    best = r.index(max(r))
    return [x - max(r[:i] + r[i + 1 :]) if i == best else Fraction() for i, x in enumerate(r)]


# Each a function of rewards r, their mean m and their standard deviation d.
REFERENCE: dict[str, Callable[[list[Fraction], Fraction, float], list[Any]]] = {
    "grpo": lambda r, m, d: [float(x - m) / (d + 1e-6) for x in r],
    "dr_grpo": lambda r, m, d: [x - m for x in r],
    "rloo": lambda r, m, d: [x - exact_mean(r[:i] + r[i + 1 :]) for i, x in enumerate(r)],
    "reinforce_pp": lambda r, m, d: r,
    "reinforce_pp_baseline": lambda r, m, d: [x - m for x in r],
    "max_rl": lambda r, m, d: [(x - m) / m if m > 0 else 0 for x in r],
    "pass_at_k": lambda r, m, d: exact_lead(r),
    "pass_at_k_normalised": lambda r, m, d: [float(x) / (d + 1e-6) for x in exact_lead(r)],
    "none": lambda r, m, d: r,
}


def exact_shaped(of: GroupValues, shaping: str) -> list[Fraction]:
    r = [Fraction(reward) for reward in of.rewards.tolist()]
    costs = [Fraction(turns) for turns in of.turns.tolist()]
    if shaping == "tokens":
        costs = [Fraction(c) + Fraction(t, 2) for c, t in np.stack([of.completion_tokens, of.tool_tokens], 1).tolist()]
    usual = exact_mean([cost for reward, cost in zip(r, costs, strict=True) if reward == max(r)])
    if shaping == "none" or max(r) <= 0 or usual <= 0:
        return r
    thrift = [min(max(1 - cost / usual, Fraction()), Fraction(1)) for cost in costs]
    return [x * (1 + t) if x == max(r) else x for x, t in zip(r, thrift, strict=True)]


def exact_values(estimator: str, r: list[Fraction]) -> list[float]:
    if estimator not in WITHOUT_VARIANCE and max(r) - min(r) <= Fraction(1e-9) * max(1, *map(abs, r)):
        return [0.0] * len(r)
    return [float(x) for x in REFERENCE[estimator](r, exact_mean(r), math.sqrt(exact_variance(r)))]


def test_every_estimator_has_a_reference() -> None:
    assert REFERENCE.keys() == ESTIMATORS.keys()


@pytest.mark.parametrize("shaping", ["none", "tokens", "turns"])
@thorough
@given(drawn=groups())
def test_the_group_phase_equals_exact_arithmetic(shaping: str, drawn: GroupValues) -> None:
    for estimator in ESTIMATORS:
        of = allowed(drawn, estimator)
        expected = exact_shaped(of, shaping)
        result = group_phase(of, recipe(estimator, shaping=shaping))
        np.testing.assert_allclose(result.shaped, [float(x) for x in expected], rtol=1e-14)
        np.testing.assert_allclose(
            result.values, exact_values(estimator, expected), rtol=1e-9, atol=1e-9, err_msg=estimator
        )


@st.composite
def batches(draw: st.DrawFn) -> BatchValues:
    rows = draw(st.lists(st.tuples(rewards, sizes), max_size=12))
    return BatchValues(values=np.array([r for r, _ in rows]), sampled_tokens=np.array([n for _, n in rows], np.int64))


@thorough
@given(batch=batches())
def test_whitening_equals_exact_arithmetic_over_every_token(batch: BatchValues) -> None:
    pairs = zip(batch.values.tolist(), batch.sampled_tokens.tolist(), strict=True)
    tokens = [Fraction(value) for value, count in pairs for _ in range(count)]
    expected = [0.0] * len(batch.values)
    if len(tokens) >= 2:
        middle, spread = exact_mean(tokens), math.sqrt(exact_variance(tokens) + Fraction(1e-8))
        expected = [float(Fraction(value) - middle) / spread for value in batch.values.tolist()]
    for estimator in ["reinforce_pp", "reinforce_pp_baseline"]:
        result = batch_phase(batch, recipe(estimator))
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("estimator", [name for name, each in ESTIMATORS.items() if each.batch is None])
def test_without_a_batch_phase_values_are_delivered_as_float32(estimator: str) -> None:
    assert not recipe(estimator).has_batch_phase
    delivered = batch_phase(
        BatchValues(values=np.array([0.1, -2.0]), sampled_tokens=np.array([3, 0])), recipe(estimator)
    )
    assert delivered.dtype == np.float32
    assert delivered.tolist() == [np.float32(0.1), -2.0]


@thorough
@given(of=groups())
def test_values_with_a_mean_as_baseline_sum_to_zero(of: GroupValues) -> None:
    for estimator in ["grpo", "dr_grpo", "rloo", "max_rl"]:
        assert math.fsum(values(estimator, allowed(of, estimator))) == pytest.approx(0, abs=1e-7), estimator


@thorough
@given(of=groups(), shift=st.integers(-100, 100))
def test_a_shift_of_all_rewards_changes_nothing(of: GroupValues, shift: int) -> None:
    for estimator in ["grpo", "dr_grpo", "rloo", "pass_at_k", "pass_at_k_normalised"]:
        shifted = values(estimator, replace(of, rewards=of.rewards + shift))
        np.testing.assert_allclose(shifted, values(estimator, of), rtol=1e-6, atol=1e-6, err_msg=estimator)


@thorough
@given(drawn=groups())
def test_twice_the_rewards_give_twice_the_values_or_the_same(drawn: GroupValues) -> None:
    for estimator, factor in {"dr_grpo": 2, "rloo": 2, "pass_at_k": 2, "none": 2, "max_rl": 1, "grpo": 1}.items():
        of = allowed(drawn, estimator)
        doubled = values(estimator, replace(of, rewards=2 * of.rewards))
        np.testing.assert_allclose(doubled, factor * values(estimator, of), rtol=1e-3, atol=1e-9, err_msg=estimator)


@pytest.mark.parametrize("shaping", ["none", "tokens", "turns"])
@thorough
@given(drawn=groups(), data=st.data())
def test_the_order_of_arrival_changes_no_bit(shaping: str, drawn: GroupValues, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(drawn.rewards))))
    columns = ["rewards", "completion_tokens", "tool_tokens", "input_tokens", "turns"]
    for estimator in ESTIMATORS:
        of, chosen = allowed(drawn, estimator), recipe(estimator, shaping=shaping)
        moved = replace(of, **{name: getattr(of, name)[order] for name in columns})
        before, after = group_phase(of, chosen), group_phase(moved, chosen)
        assert before.shaped[order].tobytes() == after.shaped.tobytes()
        assert before.values[order].tobytes() == after.values.tobytes(), estimator
        one = batch_phase(BatchValues(values=before.values, sampled_tokens=of.completion_tokens), chosen)
        other = batch_phase(BatchValues(values=after.values, sampled_tokens=moved.completion_tokens), chosen)
        assert one[order].tobytes() == other.tobytes(), estimator


@thorough
@given(reward=rewards.map(abs), noise=st.lists(st.floats(0, 4e-10), min_size=2, max_size=8))
def test_equal_rewards_give_exactly_zero(reward: float, noise: list[float]) -> None:
    for estimator in ESTIMATORS.keys() - WITHOUT_VARIANCE:
        assert values(estimator, [reward + each for each in noise]).tolist() == [0.0] * len(noise)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_three_rewards_of_a_tenth_are_equal_although_their_mean_is_not_a_tenth(estimator: str) -> None:
    chosen = recipe(estimator, group_size=3)
    result = group_phase(group([0.1, 0.1, 0.1]), chosen)
    filters = group_filters(FilterSettings(), needs_variance=chosen.needs_variance)
    verdict = judge_group(GroupRewards(rewards=np.full(3, 0.1), shaped=result.shaped), filters)
    if estimator in WITHOUT_VARIANCE:
        assert (result.values.tolist(), verdict.drop_reason) == ([0.1, 0.1, 0.1], None)
    else:
        assert (result.values.tolist(), verdict.drop_reason) == ([0.0, 0.0, 0.0], "zero_variance")


def test_shaping_tells_equal_rewards_apart_before_the_baseline_and_the_filter() -> None:
    of = group([1.0, 1.0, 0.0], [10, 30, 5], [0, 0, 0], [1, 1, 1], [1, 1, 1])
    result = group_phase(of, recipe(shaping="tokens"))
    assert result.shaped.tolist() == [1.5, 1.0, 0.0]
    assert result.values.tolist() == pytest.approx([1.5 - 2.5 / 3, 1.0 - 2.5 / 3, -2.5 / 3])


@pytest.mark.parametrize("of", [[0.0, 0.0, -1.0], [-1.0, -2.0]], ids=str)
def test_without_a_positive_reward_nobody_is_rewarded_for_being_short(of: list[float]) -> None:
    lengths = [list(range(len(of)))] * 4
    assert group_phase(group(of, *lengths), recipe(shaping="tokens")).shaped.tolist() == of


def test_empty_completions_cost_nothing_and_are_not_shaped() -> None:
    of = group([1.0, 0.0], [0, 0], [0, 0], [9, 9], [1, 1])
    assert group_phase(of, recipe(shaping="tokens")).shaped.tolist() == [1.0, 0.0]


def test_a_dropped_rollouts_reward_stays_in_the_baseline() -> None:
    rewards, kept = [1.0, 0.0, 0.0, 0.0], [0, 1, 2]
    result = group_phase(group(rewards), recipe("dr_grpo", group_size=4))
    assert result.values[kept].tolist() == [0.75, -0.25, -0.25]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_of_one_is_its_reward_where_groups_have_one_and_refused_elsewhere(estimator: str) -> None:
    alone = recipe(estimator, group_size=1)
    assert group_phase(group([0.75]), alone).values.tolist() == [0.75]
    assert not alone.needs_variance
    with pytest.raises(StageError, match=r"one rollout of 8 has no baseline"):
        group_phase(group([0.75]), recipe(estimator, group_size=8))


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e31])
def test_a_reward_that_is_no_number_is_its_rollouts_error_and_never_gets_into_a_group(reward: float) -> None:
    scored = {"r1": 1.0, "r2": reward, "r3": 0.0}
    failed = {name: error for name, each in scored.items() if (error := reward_error(each, recipe()))}
    assert list(failed) == ["r2"]
    assert f"its reward is {reward}" in failed["r2"]
    rest = [each for name, each in scored.items() if name not in failed]
    assert values("dr_grpo", rest).tolist() == [0.5, -0.5]
    with pytest.raises(StageError, match="rollout 1 of a group was to be left out: its reward is"):
        values("dr_grpo", list(scored.values()))


def test_max_rl_refuses_rollouts_with_negative_rewards() -> None:
    assert reward_error(-0.5, recipe("max_rl")) == "its reward is -0.5, but max_rl needs at least 0.0"
    assert reward_error(-0.5, recipe("grpo")) is None
    assert values("max_rl", [0.0, 0.0]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_largest_rewards_stay_finite_as_float32(estimator: str) -> None:
    chosen = recipe(estimator)
    lowest = max(-1e30, chosen.estimator.min_reward)
    result = group_phase(group([1e30, lowest, lowest]), chosen)
    batch = BatchValues(values=result.values, sampled_tokens=np.array([5, 0, 1]))
    assert np.isfinite(batch_phase(batch, chosen)).all()


def gdpo_group(of: GroupValues) -> Floats:
    weighted = [(weight, of.named_rewards[name]) for name, weight in {"right": 1.0, "short": 0.5}.items()]
    return np.sum([weight * (part - mean(part)) / deviation(part) for weight, part in weighted], axis=0)


def gdpo_batch(batch: BatchValues) -> Floats:
    return (batch.values - mean(batch.values)) / deviation(batch.values)


def test_an_estimator_over_named_rewards_with_both_phases_fits_the_seam() -> None:
    chosen = recipe("gdpo", estimators={"gdpo": Estimator(group=gdpo_group, batch=gdpo_batch)})
    assert chosen.has_batch_phase
    of = group([1.0, 0.0], named={"right": [1.0, 0.0], "short": [0.0, 1.0]})
    result = group_phase(of, chosen)
    assert result.values.tolist() == pytest.approx([math.sqrt(0.125), -math.sqrt(0.125)])
    delivered = batch_phase(BatchValues(values=result.values, sampled_tokens=np.array([4, 9])), chosen)
    assert delivered.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


def test_an_estimator_with_a_baseline_per_agent_fits_the_seam() -> None:
    baselines = {"white": 0.5, "black": 0.0}

    def rae(batch: BatchValues) -> Floats:
        values = batch.values.copy()
        for index, agent in enumerate(batch.agents):
            values[index] -= baselines[agent]
            baselines[agent] = 0.5 * baselines[agent] + 0.5 * batch.values[index]
        return values

    own = {"rae": Estimator(group=lambda of: of.rewards, batch=rae, needs_variance=False)}
    batch = BatchValues(
        values=np.array([1.0, 1.0, 1.0]), sampled_tokens=np.ones(3, np.int64), agents=("white", "black", "white")
    )
    assert batch_phase(batch, recipe("rae", estimators=own)).tolist() == [0.5, 1.0, 0.25]
    assert baselines == {"white": 0.875, "black": 0.5}


def test_linear_shaping_fits_the_seam() -> None:
    def linear(of: GroupValues) -> Floats:
        costs = [column / max(column.max(), 1) for column in (of.completion_tokens, of.input_tokens, of.turns)]
        return of.rewards - mean(of.rewards) * 0.1 * np.sum(costs, axis=0)

    chosen = recipe("none", shaping="linear", shapings={"linear": linear})
    result = group_phase(group([1.0, 0.0], [10, 5], [0, 0], [4, 4], [2, 1]), chosen)
    assert result.values.tolist() == pytest.approx([1 - 0.05 * 3, -0.05 * 2])


@pytest.mark.parametrize("wrong", [[1.0], [math.nan, 0.0], [1e39, 0.0]], ids=str)
def test_a_custom_estimator_that_gives_nonsense_is_named(wrong: list[float]) -> None:
    chosen = recipe("mine", estimators={"mine": Estimator(group=lambda _: np.array(wrong))})
    with pytest.raises(StageError, match=r"mine gave .* for 2 rollouts"):
        group_phase(group([1.0, 0.0]), chosen)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdvantageSettings(completion_weight=-1.0), "advantages.completion_weight is -1.0"),
        (lambda: AdvantageSettings(tool_weight=math.nan), "advantages.tool_weight is nan"),
        (lambda: recipe(group_size=0), "group_size is 0"),
        (lambda: recipe("dr_gpo"), r"advantages.estimator = 'dr_gpo' is not known here; did you mean 'dr_grpo'\?"),
        (
            lambda: recipe(shaping="words"),
            "length_shaping = 'words' is not known here; .*none, tokens, turns",
        ),
        (lambda: recipe(estimators={"grpo": ESTIMATORS["rloo"]}), "advantages.estimator: grpo is built in"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_settings_can_be_part_of_a_pydantic_model() -> None:
    class Run(BaseModel):
        model_config = ConfigDict(extra="forbid")
        advantages: AdvantageSettings = AdvantageSettings()

    assert Run.model_validate({"advantages": {"estimator": "rloo"}}).advantages == AdvantageSettings(estimator="rloo")
    assert Run().advantages.estimator == "dr_grpo"
    with pytest.raises(ValidationError, match=r"advantages\.estmator"):
        Run.model_validate({"advantages": {"estmator": "rloo"}})


def test_columns_that_disagree_are_refused() -> None:
    with pytest.raises(StageError, match="a group of 2 rewards has columns of"):
        group([1.0, 0.0], [1], [1, 1], [1, 1], [1, 1])
    with pytest.raises(StageError, match="a group of 0 rewards"):
        group([])
    with pytest.raises(StageError, match="a batch has 2 values, but 1 token counts"):
        BatchValues(values=np.zeros(2), sampled_tokens=np.zeros(1, np.int64))


@pytest.mark.parametrize("sampled_tokens", [[], [0, 0], [0, 1]], ids=str)
def test_a_batch_of_less_than_two_tokens_has_no_spread_and_whitens_to_zero(sampled_tokens: list[int]) -> None:
    batch = BatchValues(values=np.arange(len(sampled_tokens)) * 1.0, sampled_tokens=np.array(sampled_tokens, np.int64))
    assert batch_phase(batch, recipe("reinforce_pp")).tolist() == [0.0] * len(sampled_tokens)
