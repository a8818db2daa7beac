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
from support.advantages import allowed, group, recipe, values

from headpond.advantages import (
    ESTIMATORS,
    AdvantageSettings,
    BatchValues,
    Floats,
    GroupValues,
    batch_phase,
    group_phase,
    resolve,
    reward_error,
)
from headpond.errors import StageError

VECTORS = Path(__file__).parents[2] / "vectors" / "advantages.jsonl"
BY_NAME = ["grpo", "dr_grpo", "rloo", "pass_at_k_normalised", "reinforce_pp", "reinforce_pp_baseline"]
IN_VECTORS = {name: AdvantageSettings(estimator=name) for name in BY_NAME} | {
    "dr_grpo_length_turns": AdvantageSettings(length_shaping="turns"),
    "dr_grpo_length_tokens": AdvantageSettings(length_shaping="tokens"),
}
WITHOUT_VARIANCE = {"reinforce_pp", "remax", "none"}
BY_ROLLOUT = [name for name, each in ESTIMATORS.items() if not each.per_turn]
thorough = settings(max_examples=50)
rewards = st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.integers(-1000, 1000).map(lambda i: i / 128))
sizes = st.integers(0, 40)


@st.composite
def groups(draw: st.DrawFn) -> GroupValues:
    rows = draw(st.lists(st.tuples(rewards, sizes, sizes, sizes, sizes), min_size=2, max_size=8))
    given_rewards, *columns = zip(*rows, strict=True)
    named = {"greedy": [0.25 * n for n in columns[0]], "brief": [0.5 * n for n in columns[3]]}
    return group(list(given_rewards), *columns, named=named)


@pytest.mark.parametrize("name", IN_VECTORS)
def test_estimators_equal_other_frameworks(name: str) -> None:
    chosen = resolve(IN_VECTORS[name], group_size=8)
    for case in map(json.loads, VECTORS.read_text().splitlines()):
        parts: list[Floats] = []
        for row in case["groups"]:
            zeros = [0] * len(row["rewards"])
            of = group(row["rewards"], row["completion_tokens"], zeros, zeros, row["turns"])
            parts.append(group_phase(of, chosen).values)
        tokens = np.array([count for row in case["groups"] for count in row["completion_tokens"]])
        advantages = batch_phase(BatchValues(values=np.concatenate(parts), sampled_tokens=tokens), chosen).values
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


def exact_grpo(r: list[Fraction]) -> list[float]:
    if max(r) - min(r) <= Fraction(1e-9) * max(1, *map(abs, r)):
        return [0.0] * len(r)
    return [float(x - exact_mean(r)) / (math.sqrt(exact_variance(r)) + 1e-6) for x in r]


def exact_leave_one_out(r: list[Fraction]) -> list[float]:
    values: list[float] = []
    for i, x in enumerate(r):
        others = r[:i] + r[i + 1 :]
        equal = len(others) == 1 or max(others) - min(others) <= Fraction(1e-9) * max(1, *map(abs, others))
        values.append(float(x - exact_mean(others)) / (1 if equal else math.sqrt(exact_variance(others)) + 1e-6))
    return values


def exact_opo(r: list[Fraction], tokens: list[int]) -> list[Fraction]:
    weighted = sum((x * n for x, n in zip(r, tokens, strict=True)), Fraction())
    return [x - (weighted / sum(tokens) if sum(tokens) else exact_mean(r)) for x in r]


def fractions(of: Floats) -> list[Fraction]:
    return [Fraction(value) for value in of.tolist()]


def exact_gdpo(of: GroupValues) -> list[float]:
    parts = [exact_grpo(fractions(of.named_rewards[name])) for name in ("greedy", "brief")]
    return [math.fsum(each) for each in zip(*parts, strict=True)]


# Of named rewards and tokens.
OF_GROUP: dict[str, Callable[[GroupValues, list[Fraction]], list[Any]]] = {
    "opo": lambda of, r: exact_opo(r, of.completion_tokens.tolist()),
    "remax": lambda of, r: [x - g for x, g in zip(r, fractions(of.named_rewards["greedy"]), strict=True)],
    "gdpo": lambda of, r: exact_gdpo(of),
}
# Each a function of rewards r, their mean m and their standard deviation d.
REFERENCE: dict[str, Callable[[list[Fraction], Fraction, float], list[Any]]] = {
    "grpo": lambda r, m, d: [float(x - m) / (d + 1e-6) for x in r],
    "grpo_leave_one_out": lambda r, m, d: exact_leave_one_out(r),
    "grpo_batch": lambda r, m, d: [x - m for x in r],
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
    mean_cost = exact_mean([cost for reward, cost in zip(r, costs, strict=True) if reward == max(r)])
    if shaping == "none" or max(r) <= 0 or mean_cost <= 0:
        return r
    saved = [min(max(1 - cost / mean_cost, Fraction()), Fraction(1)) for cost in costs]
    return [x * (1 + t) if x == max(r) else x for x, t in zip(r, saved, strict=True)]


def exact_values(estimator: str, of: GroupValues, r: list[Fraction]) -> list[float]:
    if estimator == "gdpo":
        return exact_gdpo(of)
    if estimator not in WITHOUT_VARIANCE and max(r) - min(r) <= Fraction(1e-9) * max(1, *map(abs, r)):
        return [0.0] * len(r)
    if estimator in OF_GROUP:
        return [float(x) for x in OF_GROUP[estimator](of, r)]
    return [float(x) for x in REFERENCE[estimator](r, exact_mean(r), math.sqrt(exact_variance(r)))]


def test_every_estimator_has_a_reference() -> None:
    assert REFERENCE.keys() | OF_GROUP.keys() == set(BY_ROLLOUT)


@pytest.mark.parametrize("shaping", ["none", "tokens", "turns"])
@thorough
@given(drawn=groups())
def test_the_group_phase_equals_exact_arithmetic(shaping: str, drawn: GroupValues) -> None:
    for estimator in BY_ROLLOUT:
        of = allowed(drawn, estimator)
        expected = exact_shaped(of, shaping)
        result = group_phase(of, recipe(estimator, shaping=shaping))
        np.testing.assert_allclose(result.shaped, [float(x) for x in expected], rtol=1e-14)
        np.testing.assert_allclose(
            result.values, exact_values(estimator, of, expected), rtol=1e-9, atol=1e-9, err_msg=estimator
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
        result = batch_phase(batch, recipe(estimator)).values
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("framework", ["nemo_rl", "openrlhf"])
@thorough
@given(batch=batches())
def test_whitening_of_nemo_rl_and_openrlhf_divides_by_n_and_clamps(framework: Any, batch: BatchValues) -> None:
    pairs = zip(batch.values.tolist(), batch.sampled_tokens.tolist(), strict=True)
    tokens = [Fraction(value) for value, count in pairs for _ in range(count)]
    expected = [0.0] * len(batch.values)
    if len(tokens) >= 2:
        middle = exact_mean(tokens)
        variance = exact_variance(tokens) * (len(tokens) - 1) / len(tokens)
        spread = math.sqrt(max(variance, Fraction(1e-8)))
        expected = [float(Fraction(value) - middle) / spread for value in batch.values.tolist()]
    settings = AdvantageSettings(estimator="reinforce_pp", whitening=framework)
    result = batch_phase(batch, resolve(settings, group_size=8)).values
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-9)


def test_batch_phases_of_gdpo_and_grpo_batch_by_hand() -> None:
    batch = BatchValues(
        values=np.array([1.0, -1.0, 3.0, -3.0]),
        rewards=np.array([1.0, 0.0, 1.0, 0.0]),
        sampled_tokens=np.array([1, 2, 3, 4]),
    )
    spread = math.sqrt(20 / 3)
    np.testing.assert_allclose(batch_phase(batch, recipe("gdpo")).values, batch.values / spread, rtol=1e-7)
    spread = math.sqrt(1 / 3) + 1e-4
    np.testing.assert_allclose(batch_phase(batch, recipe("grpo_batch")).values, batch.values / spread, rtol=1e-7)


def test_gdpo_weighs_the_named_rewards_and_keeps_what_equal_sums_hide() -> None:
    named = {"right": [1.0, 0.0, 0.0], "brief": [0.0, 1.0, 1.0]}
    settings = AdvantageSettings(estimator="gdpo", reward_weights={"right": 2.0})
    of = group([1.0, 1.0, 1.0], named=named)  # grpo would see three equal rewards
    result = group_phase(of, resolve(settings, group_size=3))
    spread = math.sqrt(1 / 3) + 1e-6
    np.testing.assert_allclose(result.values, [2 / 3 / spread, -1 / 3 / spread, -1 / 3 / spread], rtol=1e-12)
    assert result.judged.tolist() == result.values.tolist()
    with pytest.raises(StageError, match="two or more named rewards"):
        group_phase(group([1.0, 0.0], named={"right": [1.0, 0.0]}), recipe("gdpo"))
    with pytest.raises(StageError, match="return it in every Score"):
        group_phase(group([1.0, 0.0], named={"a": [1.0, math.nan], "b": [1.0, 0.0]}), recipe("gdpo"))


def test_remax_asks_for_the_greedy_reward() -> None:
    assert values("remax", group([1.0, 0.0], named={"greedy": [0.5, 0.25]})).tolist() == [0.5, -0.25]
    with pytest.raises(StageError, match="needs the reward of a greedy completion"):
        group_phase(group([1.0, 0.0], named={"other": [0.0, 0.0]}), recipe("remax"))


@thorough
@given(of=groups())
def test_values_with_a_mean_as_baseline_sum_to_zero(of: GroupValues) -> None:
    for estimator in ["grpo", "grpo_batch", "dr_grpo", "rloo", "max_rl"]:
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
    for estimator in BY_ROLLOUT:
        of, chosen = allowed(drawn, estimator), recipe(estimator, shaping=shaping)
        named = {name: each[order] for name, each in of.named_rewards.items()}
        moved = replace(of, **{name: getattr(of, name)[order] for name in columns}, named_rewards=named)
        before, after = group_phase(of, chosen), group_phase(moved, chosen)
        assert before.shaped[order].tobytes() == after.shaped.tobytes()
        assert before.values[order].tobytes() == after.values.tobytes(), estimator
        one, other = (
            batch_phase(
                BatchValues(values=group.values, sampled_tokens=of.completion_tokens, rewards=of.rewards), chosen
            ).values
            for group, of in ((before, of), (after, moved))
        )
        assert one[order].tobytes() == other.tobytes(), estimator


@thorough
@given(reward=rewards.map(abs), noise=st.lists(st.floats(0, 4e-10), min_size=2, max_size=8))
def test_equal_rewards_give_exactly_zero(reward: float, noise: list[float]) -> None:
    for estimator in set(BY_ROLLOUT) - WITHOUT_VARIANCE - {"gdpo"}:
        assert values(estimator, [reward + each for each in noise]).tolist() == [0.0] * len(noise)


def test_max_rl_refuses_rollouts_with_negative_rewards() -> None:
    assert reward_error(-0.5, recipe("max_rl")) == "its reward is -0.5, but max_rl needs at least 0.0"
    assert reward_error(-0.5, recipe("grpo")) is None
    assert values("max_rl", [0.0, 0.0]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("sampled_tokens", [[], [0, 0], [0, 1]], ids=str)
def test_a_batch_of_less_than_two_tokens_whitens_to_zero(sampled_tokens: list[int]) -> None:
    batch = BatchValues(values=np.arange(len(sampled_tokens)) * 1.0, sampled_tokens=np.array(sampled_tokens, np.int64))
    assert batch_phase(batch, recipe("reinforce_pp")).values.tolist() == [0.0] * len(sampled_tokens)
